"""Alarms about suspicious clients and missing tags.

An alarm is raised about clients that are picked too often, about clients that report more samples
than the run's limits allow, and about clients that count as one site because their site's tag is
missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from potluck.common.run_file.run_settings import SampleLimits
from potluck.server.eligibility.picks import Expected, Picks, improbable_picks
from potluck.server.machine.roster import RunRoster
from potluck.server.machine.troubles import listed
from potluck.server.plan.cohort_limits import counted
from potluck.server.selection import Rows

_SHOWN = 3

TagLimit = tuple[str, Sequence[str], int]
"""A tag, its value for each row of the roster ("" if not set), and the maximum number of clients
with one value."""


class SelectionAlarms:
    """Raises each alarm once per client. warn: function that publishes an alarm."""

    def __init__(
        self, roster: RunRoster, limits: SampleLimits, warn: Callable[[str], None]
    ) -> None:
        self._roster = roster
        self._limits = limits
        self._warn = warn
        self._lopsided: set[int] = set()
        self._available: Rows | None = None
        self._picks: Picks = np.zeros(0, dtype=np.int64)
        self._expected: Expected = np.zeros(0)
        self._boasters: set[str] = set()
        self._untagged: set[str] = set()
        self.largest_weight: float | None = None
        """The largest weight of a client in the newest round, as a share of all weights; None if
        unknown."""

    def choosing(self, available: Rows) -> None:
        """Record the available clients, among which the cohort of the next committed round is
        chosen."""
        self._available = available

    def look_at_picks(self, cohort: Sequence[str]) -> None:
        """Raise an alarm about clients picked far more often than a uniform choice among the
        available clients would pick them.

        cohort: clients of the round that was just committed. A round that began before a restart
        does not count.
        """
        available, self._available = self._available, None
        if available is None or not len(available):
            return
        joined = len(self._roster) - len(self._picks)
        self._picks = np.append(self._picks, np.zeros(joined, dtype=np.int64))
        self._expected = np.append(self._expected, np.zeros(joined))
        self._picks[self._roster.rows(cohort)] += 1
        self._expected[available] += len(cohort) / len(available)
        found = improbable_picks(self._picks, self._expected).tolist()
        new = [row for row in found if row not in self._lopsided]
        self._lopsided.update(new)
        if new:
            named = [
                f"{self._roster.ids[row]} ({int(self._picks[row])} times instead of "
                f"{self._expected[row]:.1f})"
                for row in new
            ]
            self._warn(
                f"selection is lopsided: {listed(named, _SHOWN)}, far more often than by chance "
                "among the clients that were available; a flattering profile can cause this; see "
                "`potluck profiles`, and consider selector_limits.maximum_share or `potluck "
                "clients quarantine`"
            )

    def look_at_tags(self, limits: Sequence[TagLimit], chosen: int, count: int) -> None:
        """Raise an alarm about a tag that hosts don't set, if it made a cohort smaller than
        requested.

        limits: limits of the run's at_most_per. chosen: number of clients in the cohort. count:
        number of clients requested.
        """
        for tag, values, most in limits:
            untagged = sum(not value for value in values)
            if chosen < count and untagged > most and tag not in self._untagged:
                self._untagged.add(tag)
                self._warn(
                    f"the cohort has {chosen} of {count} clients: the hosts of {untagged} clients "
                    f"do not set the tag '{tag}', and selector_limits.at_most_per accepts {most} "
                    "of these clients together; set the tag in the [tags] of hosts, or correct "
                    "its name"
                )

    def look_at_samples(self, disclosed: Mapping[str, int]) -> None:
        """Raise an alarm about clients that report more samples than the run's limits allow.
        disclosed: number of samples of each client in the newest round."""
        samples = np.array(list(disclosed.values()), dtype=np.int64)
        counts = counted(samples, self._limits)
        self.largest_weight = float(counts.max() / counts.sum()) if disclosed else None
        less = {
            client: (int(said), int(count))
            for client, said, count in zip(disclosed, samples, counts, strict=True)
            if count < said
        }
        new = [client for client in sorted(less) if client not in self._boasters]
        self._boasters.update(new)
        if new:
            each = [
                f"{client} ({less[client][0]}, weighted by {less[client][1]})" for client in new
            ]
            self._warn(
                "clients report more samples than the run's sample_limits allow: "
                f"{listed(each, _SHOWN)}; raise the limits if the numbers are true, or else see "
                "`potluck clients quarantine`"
            )
