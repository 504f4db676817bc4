"""The rules on which clients may be selected in a run, in one place.

A client is excluded if it is in quarantine, if its host can't train it, or if it was picked too
often. It is also excluded if it has not disclosed a profile that the selector needs. If label
counts are summed over groups (cells), clients without a group are excluded too. Used on the event
loop, between the state machine, which knows the connected clients, and the selector.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from potluck.common.errors import RunError
from potluck.common.run_file.run_settings import MissingProfiles
from potluck.server.eligibility.collected_sums import LabelSums
from potluck.server.eligibility.host_checks import HostChecks
from potluck.server.eligibility.left_out import LeftOutRegister
from potluck.server.eligibility.picks import PickRecord, cap_on_picks, under_cap
from potluck.server.machine import events as rounds
from potluck.server.machine.roster import RunRoster
from potluck.server.machine.troubles import each_once, listed
from potluck.server.plan.plan import RunPlan
from potluck.server.profiles.collect import Profiling
from potluck.server.selection import Rows

_SHOWN = 3


class ScarceError(RunError):
    """Too few clients may be selected now."""


@dataclass(kw_only=True)
class Eligibility:
    """The rules of one run on which clients may be selected. warn: function that publishes a
    warning. post: function that passes an event to the state machine."""

    plan: RunPlan
    roster: RunRoster
    profiling: Profiling
    picks: PickRecord
    checks: HostChecks
    left_out: LeftOutRegister
    label_sums: LabelSums
    warn: Callable[[str], None]
    post: Callable[[rounds.Event], None]
    quarantined: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)
    """Clients that disclosed no profile, with the reasons."""
    host_of: Callable[[str], str] = lambda _: ""
    """Function that returns the host of a client; an empty text if the host is unknown."""
    is_member: Callable[[str], bool] = lambda _: True
    """Function that returns True for clients with a valid member record, and for all clients if the
    run needs no such records."""

    @property
    def excluded(self) -> tuple[str, ...]:
        """Clients that can't be selected at present, sorted: in quarantine, without a needed
        profile, or not a member."""
        refused = set() if self._includes_all else set(self.refused)
        outsiders = {client for client in self.roster if not self.is_member(client)}
        return tuple(sorted(self.quarantined | refused | outsiders))

    @property
    def _includes_all(self) -> bool:
        """True if clients without a profile may be selected too."""
        return self.plan.run_file.profiles.missing is MissingProfiles.INCLUDE

    def quarantine(self, clients: Collection[str]) -> None:
        """Set the clients in quarantine, from the next selection on."""
        self.quarantined = frozenset(clients)
        self.post(rounds.Excluded(self.excluded))

    async def eligible(self, action: rounds.Select, present: Callable[[str], bool]) -> Rows:
        """Collect missing profiles; return the sorted rows of clients that may be selected.

        Raises RunError if a client refuses and the run needs all profiles; ScarceError if too few
        clients are left for a quorum.
        """
        able = await self.checks.able(action, present)
        excluded = set(self.excluded)
        clients = [client for client in able if client not in excluded]
        try:
            clients = await self._with_profile(clients, action, present)
        finally:
            self.post(rounds.Excluded(self.excluded))
        rows = np.sort(self.roster.rows(clients))
        share = self.plan.run_file.selector_limits.maximum_share
        cap = cap_on_picks(share, action.round)
        least = self.plan.rules.hosts
        hosts = [self.host_of(client) for client in self.roster] if least else ()
        counts, count = self.picks.counts, action.count
        return under_cap(rows, counts, cap=cap, count=count, hosts=hosts, least_hosts=least)

    async def in_label_sums(self, rows: Rows, present: Callable[[str], bool]) -> Rows:
        """Find or compute the secure sums of label counts. Return the rows of clients whose group
        (cell) has a sum.

        Returns all rows if label counts are not summed by cell, or if clients without a profile may
        be selected too.
        """
        await self.label_sums.find(self.roster.clients(rows), present)
        cells = self.label_sums.cell_counts
        if cells is None or self._includes_all:
            return rows
        return rows[[client in cells for client in self.roster.clients(rows)]]

    async def _with_profile(
        self, clients: list[str], action: rounds.Select, present: Callable[[str], bool]
    ) -> list[str]:
        """Return the clients that have disclosed the needed profiles, or don't need to disclose
        any."""
        asked = [client for client in clients if client not in self.refused]
        tag = f"{action.round}.{action.attempt}/profile"
        collected = await self.profiling.collect(asked, tag=tag, present=present)
        if collected.unable:
            await self.left_out.add_and_store(collected.unable)
        if collected.refused:
            self._handle_refusals(collected.refused, first=action.round == 1)
        without = set(collected.unable)
        if not self._includes_all:
            without |= collected.silent | collected.refused.keys()
            if collected.silent:
                self.warn(
                    f"round {action.round}: {listed(sorted(collected.silent), _SHOWN)} did not "
                    "disclose a profile in time and can't be selected yet"
                )
        left = [client for client in clients if client not in without]
        needed = self.plan.run_file.round.needed(self.plan.run_file.clients_per_round)
        if len(left) < needed:
            raise ScarceError(
                f"round {action.round}: {len(left)} clients may be selected, but at least "
                f"{needed} are needed; all other clients are in quarantine, have no profile or "
                "can't take part"
                + (f": {each_once(collected.unable, 'excluded')}" * bool(collected.unable)),
            )
        return left

    def _handle_refusals(self, refused: Mapping[str, str], *, first: bool) -> None:
        """Continue without the profiles of these clients. Raises RunError if the run needs all
        profiles."""
        whys = list(dict.fromkeys(refused.values()))
        shown = "; ".join(whys[:_SHOWN]) + (
            f"; and {len(whys) - _SHOWN} more" * (len(whys) > _SHOWN)
        )
        if self.plan.run_file.profiles.missing is MissingProfiles.FAIL and first:
            raise RunError(
                f"the selector needs a profile of every client, but {len(refused)} clients "
                f"disclosed none: {shown}",
            )
        self.refused |= refused
        fate = "is selected as one without" if self._includes_all else "will not be selected"
        self.warn(f"no profile of {listed(sorted(refused), _SHOWN)}, who {fate}: {shown}")
