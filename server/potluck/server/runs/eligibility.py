"""Who may be selected in a run: not in quarantine, with the profile that is needed, not too often.

Lives on the event loop, between the round machine, which knows who is there, and the selector.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import RunError
from potluck.common.runfile import MissingProfiles
from potluck.server.cohorts.lopsidedness import lopsidedness
from potluck.server.cohorts.pick_cap import cap_on_picks, under_cap
from potluck.server.cohorts.sample_limits import counted
from potluck.server.profiles.collect import Profiling
from potluck.server.rounds.plan import RunPlan
from potluck.server.rounds.roster import RunRoster
from potluck.server.rounds.troubles import told_once
from potluck.server.selection import Rows

Say = Callable[[str], None]
LeaveOut = Callable[[Mapping[str, str]], Awaitable[None]]
_SHOWN = 3


class ScarceError(RunError):
    """Too few clients may be selected now."""


class Eligibility:
    """The rules of one run. `say` tells people that something is wrong; `leave_out` takes clients
    out of the run, and is told why."""

    def __init__(
        self,
        plan: RunPlan,
        roster: RunRoster,
        profiling: Profiling,
        say: Say,
        leave_out: LeaveOut,
    ) -> None:
        self.quarantined: frozenset[str] = frozenset()
        """Set it whenever it changes; it counts from the next selection on."""
        self._policy = plan.run_file.profiles
        self._needed = plan.run_file.round.needed(plan.run_file.count)
        self._share = plan.run_file.selector_limits.maximum_share
        self._roster = roster
        self._profiling = profiling
        self._say = say
        self._leave_out = leave_out
        self._counted_picks = np.zeros(0, dtype=np.int64)
        self._limits = plan.run_file.sample_limits
        self._alarmed: set[int] = set()
        self._boasters: set[str] = set()
        self.largest_weight: float | None = None
        """The largest share of a client in the samples of the newest round, as they count."""
        self._refused: dict[str, str] = {}

    @property
    def excluded(self) -> tuple[str, ...]:
        """Who can't be selected whatever happens, sorted."""
        refused = set() if self._includes_all else set(self._refused)
        return tuple(sorted(self.quarantined | refused))

    @property
    def _includes_all(self) -> bool:
        return self._policy.missing is MissingProfiles.INCLUDE

    async def eligible(
        self,
        available: Sequence[str],
        *,
        round_number: int,
        attempt: int,
        count: int,
        present: Callable[[str], bool],
    ) -> Rows:
        """Rows of those who may be selected, sorted, once they have disclosed what is needed.

        Raises RunError where somebody refuses and the run can't do without; ScarceError where too
        few are left for a quorum.
        """
        excluded = set(self.excluded)
        clients = [client for client in available if client not in excluded]
        asked = [client for client in clients if client not in self._refused]
        tag = f"{round_number}.{attempt}/profile"
        collected = await self._profiling.collect(asked, tag=tag, present=present)
        if collected.unable:
            await self._leave_out(collected.unable)
            clients = [client for client in clients if client not in collected.unable]
        if collected.refused:
            self._handle_refusals(collected.refused, first=round_number == 1)
        if not self._includes_all:
            away = collected.silent | set(collected.refused)
            clients = [client for client in clients if client not in away]
            if collected.silent:
                self._say(
                    f"round {round_number}: {_list(sorted(collected.silent))} did not disclose a "
                    "profile in time and can't be selected yet"
                )
        if len(clients) < self._needed:
            raise ScarceError(
                f"round {round_number}: {len(clients)} clients may be selected, at least "
                f"{self._needed} are needed; others are in quarantine, have no profile or can't "
                "take part"
                + (f": {told_once(collected.unable, 'left out')}" * bool(collected.unable)),
            )
        rows = np.sort(self._roster.rows(clients))
        cap = cap_on_picks(self._share, round_number)
        return under_cap(rows, self._picks, cap=cap, count=count)

    def _handle_refusals(self, refused: Mapping[str, str], *, first: bool) -> None:
        """Live with it that clients gave no profile, or raise RunError."""
        whys = list(dict.fromkeys(refused.values()))
        shown = "; ".join(whys[:_SHOWN]) + (
            f"; and {len(whys) - _SHOWN} more" * (len(whys) > _SHOWN)
        )
        if self._policy.missing is MissingProfiles.FAIL and first:
            raise RunError(
                f"the selector needs a profile of every client, and {len(refused)} gave none: "
                f"{shown}",
            )
        self._refused |= refused
        fate = "is selected as one without" if self._includes_all else "will not be selected"
        self._say(f"no profile of {_list(sorted(refused))}, who {fate}: {shown}")

    # Picks ------------------------------------------------------------------------------------

    @property
    def _picks(self) -> NDArray[np.int64]:
        """Picks by row."""
        joined = len(self._roster) - len(self._counted_picks)
        if joined:
            self._counted_picks = np.append(self._counted_picks, np.zeros(joined, dtype=np.int64))
        return self._counted_picks

    def picks_summary(self) -> tuple[int, int]:
        """How often the client picked most was picked, and how many were never."""
        return int(self._picks.max(initial=0)), int((self._picks == 0).sum())

    def count_picks(self, cohort: Sequence[str]) -> None:
        """A round with this cohort is committed; raises the alarm about clients picked too often,
        once for each."""
        self._picks[self._roster.rows(cohort)] += 1
        self._look_for_lopsidedness()

    def restore_picks(self, picks: Mapping[str, int]) -> None:
        """So often clients were in the cohorts that are committed, before the run is resumed."""
        for client, count in picks.items():
            self._picks[self._roster.row(client)] = count
        self._look_for_lopsidedness()

    def _look_for_lopsidedness(self) -> None:
        found = lopsidedness(self._picks)
        if found is None:
            return
        new = [int(row) for row in found.unlikely if int(row) not in self._alarmed]
        self._alarmed.update(new)
        if new:
            named = _list(
                [f"{self._roster.ids[row]} ({int(self._picks[row])} times)" for row in new]
            )
            self._say(
                f"selection is lopsided: {named} far above the mean of {self._picks.mean():.1f}; a "
                "flattering profile does that: see `potluck profiles`, consider "
                "selector_limits.maximum_share or `potluck clients quarantine`"
            )

    # Samples ----------------------------------------------------------------------------------

    def note_samples(self, disclosed: Mapping[str, int]) -> None:
        """A round is committed whose included clients disclosed so many samples; raises the alarm
        about those that count with fewer, once for each."""
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
            self._say(
                f"too many samples are told: by {_list(each)}, beyond the run's sample_limits; "
                "raise them if that is true, else see `potluck clients quarantine`"
            )


def _list(clients: Sequence[str]) -> str:
    shown = ", ".join(clients[:_SHOWN])
    return shown if len(clients) <= _SHOWN else f"{shown} and {len(clients) - _SHOWN} more"
