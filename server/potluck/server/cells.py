"""Selection by cell: label counts of groups instead of clients (`disclosure = "cells"`).

A public coin draws cells of clients; each cell is summed securely, once for its clients' data, and
every client then stands for the mean of its cell. The coordinator learns sums over cells; selectors
work on them as they do on single clients. Lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import RunError
from potluck.common.secagg.cells import CELL_HOSTS, draw_cells, public_coin
from potluck.server.label_totals import guarantee, is_current, members_of, sum_terms, task_reference
from potluck.server.secure_sums import Outcome
from potluck.server.standing import Standing
from potluck.server.store import SecureSum

CELLS = "cells"
"""The kind of sum, as clients' policies call it, and the run file's name for the mode."""

_SHOWN = 3


class Cells:
    """The part of a run that has cells summed, before its first selection and when others join."""

    def __init__(self, run: Standing) -> None:
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
        stored: list[SecureSum] = await run.environment.in_store(
            lambda store: store.sums(kind=CELLS)
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
        run = self._run
        sessions = {client: run.environment.attendance.session_of(client) for client in clients}
        hosts = {client: each.host_id for client, each in sessions.items() if each is not None}
        least = run.blueprint.run_file.profiles.sum_hosts
        size = max(least, min(CELL_HOSTS, len(set(hosts.values()))))
        epochs = sorted({each.data_epoch for each in sessions.values() if each is not None})
        federation = run.environment.trust.federation
        coin = public_coin(federation, hosts, f"data epochs {epochs}")
        cells = draw_cells(hosts, coin, size=size)
        if not cells:
            run.say(
                f"{len(clients)} clients on {len(set(hosts.values()))} hosts make no cell of "
                f"{size} hosts; they wait for others",
                warning=True,
            )
        for cell in cells:
            await self._sum_cell(cell)

    async def _sum_cell(self, cell: Sequence[str]) -> None:
        run = self._run
        try:
            outcome = await run.environment.sums.sum_counts(
                sum_terms(run, CELLS), cell, present=run.is_present
            )
        except RunError as error:
            run.say(f"no sum of a cell of {len(cell)} clients: {error.message}", warning=True)
            return
        if outcome.total is None:
            run.say(f"no sum of a cell of {len(cell)} clients: {outcome.explain()}", warning=True)
            return
        self._use(list(outcome.record.clients), outcome.total.astype(np.float64))
        self._announce(outcome, cell)

    def _announce(self, outcome: Outcome, cell: Sequence[str]) -> None:
        record = outcome.record
        holds = guarantee(independent=self._run.environment.trust.independent)
        self._run.say(
            f"a cell of {len(record.clients)} clients on {record.hosts} hosts was summed ({holds})"
        )
        left_out = sorted(set(cell) - record.clients.keys())
        if left_out:
            shown = ", ".join(left_out[:_SHOWN])
            more = f" and {len(left_out) - _SHOWN} more" * (len(left_out) > _SHOWN)
            self._run.say(f"without a cell until their data change: {shown}{more}", warning=True)
