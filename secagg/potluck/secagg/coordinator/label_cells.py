"""Selection by cell: label counts of groups instead of clients (`disclosure = "cells"`).

A public coin draws cells of clients. Each cell is summed securely, once per version of its clients'
data. The coordinator learns the sums over cells only; selectors treat the mean of a cell as the
label counts of each client in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from potluck.common.disclosure import SumKind
from potluck.common.errors import RunError
from potluck.secagg.coordinator.counts import SecureSums, SumOutcome
from potluck.secagg.coordinator.label_sums import SecureLabelSums, members_of, noise_of, sum_terms
from potluck.secagg.protocol.primitives.cells import cells_of_members
from potluck.server.eligibility.collected_sums import Counts, Say
from potluck.server.profiles.trust import Trust
from potluck.server.rounds.plan import RunPlan
from potluck.server.rounds.troubles import listed

_SHOWN = 3


class LabelCells(SecureLabelSums):
    """Label counts by cell, summed before the first selection and when more clients join."""

    def __init__(
        self, run_id: str, plan: RunPlan, sums: SecureSums, trust: Trust, say: Say
    ) -> None:
        super().__init__(run_id, plan, sums, trust, say)
        self.cell_counts = self._counts = dict[str, Counts]()
        self._tried: set[str] = set()
        self._read = False

    async def find(self, clients: Sequence[str], present: Callable[[str], bool]) -> None:
        """Find or compute the sums of these clients' cells. Raises RunError if no client's cell has
        a sum.
        """
        if not self._read:
            self._read = True
            await self._read_stored()
        waiting = [client for client in clients if client not in self._counts]
        fresh = [client for client in waiting if client not in self._tried]
        if fresh:
            self._tried.update(fresh)
            await self._sum(waiting, present)
        if not any(client in self._counts for client in clients):
            raise RunError(
                'disclosure = "cells": no cell of these clients could be summed; the messages of '
                "this run say why"
            )

    async def _read_stored(self) -> None:
        for each in reversed(await self._stored(SumKind.CELLS)):
            members = members_of(each)
            if self._is_current(each) and not any(client in self._counts for client in members):
                self._use(members, np.array(each.total, dtype=np.float64))

    def _use(self, members: Sequence[str], total: Counts) -> None:
        total = total.clip(min=0.0)  # noise can make it negative
        for client in members:
            self._counts[client] = total / len(members)
        self.totals = total if self.totals is None else self.totals + total

    async def _sum(self, clients: Sequence[str], present: Callable[[str], bool]) -> None:
        """Sum the cells of these clients, if enough members of the cell are connected.

        Cells are drawn from all members, connected or not. Each client draws the cells itself, and
        joins a sum only with the clients of its own cell. A client is in at most one sum.
        """
        trust, least = self._trust, self._profiles.sum_hosts
        hosts = {} if trust.members is None else trust.members.hosts
        sessions = {client: self._sums.attendance.session_of(client) for client in clients}
        epoch_of = {client: each.data_epoch for client, each in sessions.items() if each}
        for epoch in sorted(set(epoch_of.values())):
            cells = cells_of_members(hosts, trust.federation, data_epoch=epoch, least_hosts=least)
            waiting = {client for client, its in epoch_of.items() if its == epoch}
            for cell in cells:
                here = sorted(waiting.intersection(cell))
                if not here:
                    continue
                waiting.difference_update(here)
                if len({hosts[client] for client in here}) >= least:
                    await self._sum_cell(here, len(cell), present)
                else:
                    self._say(
                        f"{len(here)} of the {len(cell)} clients of a cell attend and are in no "
                        f"sum yet, too few hosts: {listed(here, _SHOWN)} wait for others",
                        warning=True,
                    )
            if waiting:
                self._say(
                    f"{listed(sorted(waiting), _SHOWN)}: in no cell that can be summed, as "
                    f"{len(hosts)} members on {len(set(hosts.values()))} hosts are drawn",
                    warning=True,
                )

    async def _sum_cell(
        self, cell: Sequence[str], drawn: int, present: Callable[[str], bool]
    ) -> None:
        terms = sum_terms(self._run_id, self._plan, SumKind.CELLS)
        try:
            outcome = await self._sums.sum_counts(terms, cell, present=present)
        except RunError as error:
            self._say(f"no sum of a cell of {len(cell)} clients: {error.message}", warning=True)
            return
        if outcome.total is None:
            why = outcome.explain()
            self._say(f"no sum of a cell of {len(cell)} clients: {why}", warning=True)
            return
        self._use(list(outcome.record.clients), outcome.total.astype(np.float64))
        self._announce(outcome, cell, drawn)

    def _announce(self, outcome: SumOutcome, cell: Sequence[str], drawn: int) -> None:
        record = outcome.record
        self._say(
            f"{len(record.clients)} clients of a cell of {drawn}, on {record.hosts} hosts, were "
            f"summed, {noise_of(record.epsilon)} ({self._trust_statement()})"
        )
        left_out = sorted(set(cell) - record.clients.keys())
        if left_out:
            whys = [
                f"{client} ({outcome.troubles[client]})"
                for client in left_out
                if client in outcome.troubles
            ]
            why = f": {'; '.join(whys[:_SHOWN])}" if whys else ""
            self._say(f"not in the sum of its cell: {listed(left_out, _SHOWN)}{why}", warning=True)
