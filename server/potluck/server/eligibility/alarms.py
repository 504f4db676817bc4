"""Alarms about clients that are picked too often, claim more samples than they count with, or
count as one site because nobody said where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from potluck.common.run_file.run_settings import SampleLimits
from potluck.server.cohorts.sample_limits import counted
from potluck.server.eligibility.lopsidedness import Picks, lopsidedness
from potluck.server.rounds.roster import RunRoster
from potluck.server.rounds.troubles import listed

_SHOWN = 3

TagLimit = tuple[str, Sequence[str], int]
"""A tag, its value for each row of the roster (empty: not given), and the most with the same."""


class SelectionAlarms:
    """Raises each alarm once for each client. warn: publishes it."""

    def __init__(
        self, roster: RunRoster, limits: SampleLimits, warn: Callable[[str], None]
    ) -> None:
        self._roster = roster
        self._limits = limits
        self._warn = warn
        self._lopsided: set[int] = set()
        self._boasters: set[str] = set()
        self._untagged: set[str] = set()
        self.largest_weight: float | None = None
        """The largest share of a client in the samples of the newest round, as they count."""

    def look_at_picks(self, picks: Picks) -> None:
        """Look for clients picked far above the mean. picks: by row."""
        found = lopsidedness(picks)
        if found is None:
            return
        new = [int(row) for row in found.unlikely if int(row) not in self._lopsided]
        self._lopsided.update(new)
        if new:
            named = [f"{self._roster.ids[row]} ({int(picks[row])} times)" for row in new]
            self._warn(
                f"selection is lopsided: {listed(named, _SHOWN)} far above the mean of "
                f"{picks.mean():.1f}; a flattering profile does that: see `potluck profiles`, "
                "consider selector_limits.maximum_share or `potluck clients quarantine`"
            )

    def look_at_tags(self, limits: Sequence[TagLimit], chosen: int, count: int) -> None:
        """Look for tags that hosts do not give, where they made a cohort smaller than asked for.

        limits: of the run's at_most_per. chosen, count: clients of the cohort, and asked for.
        """
        for tag, values, most in limits:
            untagged = sum(not value for value in values)
            if chosen < count and untagged > most and tag not in self._untagged:
                self._untagged.add(tag)
                self._warn(
                    f"the cohort has {chosen} of {count} clients: the hosts of {untagged} clients "
                    f"do not give the tag '{tag}', and selector_limits.at_most_per takes {most} of "
                    "these together; set it in the [tags] of hosts, or correct its name"
                )

    def look_at_samples(self, disclosed: Mapping[str, int]) -> None:
        """Look for clients beyond the run's limits. disclosed: by the newest round's clients."""
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
                f"{client} ({less[client][0]}, counts with {less[client][1]})" for client in new
            ]
            self._warn(
                f"too many samples are told: by {listed(each, _SHOWN)}, beyond the run's "
                "sample_limits; raise them if that is true, else see `potluck clients quarantine`"
            )
