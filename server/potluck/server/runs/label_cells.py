"""Selection by cell: label counts of groups instead of clients (`disclosure = "cells"`).

A public coin draws cells of clients; each cell is summed securely, once for its clients' data, and
every client then stands for the mean of its cell. The coordinator learns sums over cells; selectors
work on them as they do on single clients. Lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.common.disclosure import SumKind
from potluck.common.errors import RunError
from potluck.common.secagg.primitives.cells import cells_of_members
from potluck.server.runs.label_totals import (
    is_current,
    members_of,
    sum_terms,
    task_reference,
    trust_statement,
)
from potluck.server.runs.run import Run
from potluck.server.store import SecureSum
from potluck.server.sums.counts import SumOutcome

_SHOWN = 3


class Cells:
    """The part of a run that has cells summed, before its first selection and when others join."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tried: set[str] = set()
        self._read = False

    @property
    def wanted(self) -> bool:
        """Whether the selector needs label counts, and gets them by cell."""
        return self._run.profiling.by_cell

    async def find(self, clients: Sequence[str]) -> None:
        """Have the sums of these clients' cells ready. Raises RunError where nobody has one."""
        if not self.wanted:
            return
        run = self._run
        if not self._read:
            self._read = True
            await self._read_stored()
        waiting = [client for client in clients if client not in run.cell_counts]
        fresh = [client for client in waiting if client not in self._tried]
        if fresh:
            self._tried.update(fresh)
            await self._sum(waiting)
        if not any(client in run.cell_counts for client in clients):
            raise RunError(
                'disclosure = "cells": no cell of these clients could be summed; the messages of '
                "this run say why"
            )

    async def _read_stored(self) -> None:
        run, task = self._run, task_reference(self._run)
        stored: list[SecureSum] = await run.services.in_store(
            lambda store: store.sums(kind=SumKind.CELLS.value)
        )
        for each in reversed(stored):
            members = members_of(each)
            usable = each.total is not None and each.task == task and is_current(run, each)
            if usable and not any(client in run.cell_counts for client in members):
                self._use(members, np.array(each.total, dtype=np.float64))

    def _use(self, members: Sequence[str], total: NDArray[np.float64]) -> None:
        run = self._run
        total = total.clip(min=0.0)  # below 0 only with noise
        for client in members:
            run.cell_counts[client] = total / len(members)
        before = run.label_totals
        run.label_totals = total if before is None else before + total

    async def _sum(self, clients: Sequence[str]) -> None:
        """Sum the cells of these clients that enough of their members attend.

        Cells are those of all members, whoever attends: clients draw them by themselves, and are in
        no sum with anybody else.
        """
        run, trust = self._run, self._run.services.trust
        hosts = {} if trust.members is None else trust.members.hosts
        least = run.plan.run_file.profiles.sum_hosts
        sessions = {client: run.services.attendance.session_of(client) for client in clients}
        epoch_of = {client: each.data_epoch for client, each in sessions.items() if each}
        for epoch in sorted(set(epoch_of.values())):
            cells = cells_of_members(hosts, trust.federation, data_epoch=epoch, least_hosts=least)
            waiting = {client for client, its in epoch_of.items() if its == epoch}
            for cell in cells:
                here = sorted(waiting.intersection(cell))
                if not here or any(client in run.cell_counts for client in cell):
                    continue  # whoever missed its sum would be a difference from it
                waiting.difference_update(here)
                if len({hosts[client] for client in here}) >= least:
                    await self._sum_cell(here, len(cell))
                else:
                    self._wait_for_others(here, cell)
            if waiting:
                run.say(
                    f"{_list(sorted(waiting))}: in no cell that can be summed, as {len(hosts)} "
                    f"members on {len(set(hosts.values()))} hosts are drawn",
                    warning=True,
                )

    def _wait_for_others(self, here: Sequence[str], cell: Sequence[str]) -> None:
        self._run.say(
            f"{len(here)} of the {len(cell)} clients of a cell attend, which is too few hosts: "
            f"{_list(here)} wait for the others",
            warning=True,
        )

    async def _sum_cell(self, cell: Sequence[str], drawn: int) -> None:
        run = self._run
        try:
            outcome = await run.services.sums.sum_counts(
                sum_terms(run, SumKind.CELLS), cell, present=run.is_present
            )
        except RunError as error:
            run.say(f"no sum of a cell of {len(cell)} clients: {error.message}", warning=True)
            return
        if outcome.total is None:
            run.say(f"no sum of a cell of {len(cell)} clients: {outcome.explain()}", warning=True)
            return
        self._use(list(outcome.record.clients), outcome.total.astype(np.float64))
        self._announce(outcome, cell, drawn)

    def _announce(self, outcome: SumOutcome, cell: Sequence[str], drawn: int) -> None:
        record = outcome.record
        holds = trust_statement(independent=self._run.services.trust.independent)
        self._run.say(
            f"{len(record.clients)} clients of a cell of {drawn}, on {record.hosts} hosts, were "
            f"summed ({holds})"
        )
        left_out = sorted(set(cell) - record.clients.keys())
        if left_out:
            self._run.say(
                f"without a cell until their data change: {_list(left_out)}", warning=True
            )


def _list(clients: Sequence[str]) -> str:
    more = f" and {len(clients) - _SHOWN} more" * (len(clients) > _SHOWN)
    return ", ".join(clients[:_SHOWN]) + more
