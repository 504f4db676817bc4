"""Label counts of a run's clients, from secure sums: over all clients, or over groups (cells)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from potluck.common.disclosure import SumKind, TaskReference, canonical_json
from potluck.common.errors import RunError
from potluck.common.learning.step_by_step import UNSAFE_STEPWISE
from potluck.common.run_file.run_settings import ProfileSettings
from potluck.secagg.coordinator.counts import SecureSums, SumOutcome
from potluck.secagg.coordinator.sum_session import SumTerms
from potluck.secagg.protocol.primitives.cells import cells_of_members
from potluck.server.eligibility.collected_sums import Counts, LabelSums, Say
from potluck.server.hosts.instructions import task_plugin
from potluck.server.machine.troubles import listed
from potluck.server.plan.plan import RunPlan
from potluck.server.profiles.trust import Trust
from potluck.server.store import SecureSum

# Terms and outcomes -------------------------------------------------------------------------------


class SecureLabelSums(LabelSums):
    """The label counts of one run: base class of `LabelTotals` and `LabelCells`."""

    def __init__(
        self, run_id: str, plan: RunPlan, sums: SecureSums, trust: Trust, say: Say
    ) -> None:
        super().__init__()
        self._run_id = run_id
        self._plan = plan
        self._profiles = plan.run_file.profiles
        self._sums = sums
        self._trust = trust
        self._say = say

    async def _stored(self, kind: SumKind) -> list[SecureSum]:
        """Return stored sums for the run's task with at most the run's noise, oldest first."""
        stored: list[SecureSum] = await self._sums.in_store(
            lambda store: store.sums(kind=kind.value)
        )
        task = task_reference(self._plan)
        done = [each for each in stored if each.total is not None and each.task == task]
        return [each for each in done if self._is_near_enough(each)]

    def _is_near_enough(self, stored: SecureSum) -> bool:
        """Return True if a sum is exact, or has at most the noise of this run."""
        wanted, found = epsilon_of_sums(self._profiles), epsilon_of(stored)
        return found is None or (wanted is not None and found >= wanted)

    def _is_current(self, stored: SecureSum) -> bool:
        """Return True if no connected client of a sum has changed its data since the sum."""
        attendance = self._sums.attendance
        sessions = {client: attendance.session_of(client) for client in members_of(stored)}
        return all(
            session is None or session.data_epoch == stored.epochs.get(client)
            for client, session in sessions.items()
        )

    def _trust_statement(self) -> str:
        """Return a short text that names the parties from which a sum hides the clients' counts."""
        if self._trust.independent:
            return "holds against a lying coordinator"
        return "holds against an honest-but-curious coordinator: one party keeps both roots"


def task_reference(plan: RunPlan) -> str:
    """Return the canonical name of the task whose labels are counted."""
    task = plan.run_file.task
    reference = TaskReference(name=task.name, options=task.options)
    return canonical_json(reference.model_dump(mode="json"))


def sum_terms(run_id: str, plan: RunPlan, kind: SumKind) -> SumTerms:
    """Return the terms of a sum of a run's label counts."""
    run_file = plan.run_file
    profiles = run_file.profiles
    return SumTerms(
        run_id=run_id,
        kind=kind,
        subject=f"label counts of {run_file.task.name}",
        task=task_plugin(run_file),
        task_reference=task_reference(plan),
        classes=plan.task.classes,
        least_hosts=profiles.sum_hosts,
        colluding_hosts=profiles.sum_colluding_hosts,
        stage_seconds=profiles.sum_stage_seconds,
        epsilon=None if kind is SumKind.STEPWISE else epsilon_of_sums(profiles),
        sensitivity=1 if profiles.adjacency == "add-remove" else 2,
    )


def epsilon_of_sums(profiles: ProfileSettings) -> float | None:
    """Return the ε of a run's sums over the federation or cells; None for exact sums."""
    return profiles.sum_epsilon if profiles.sum_mode == "noisy" else None


def epsilon_of(stored: SecureSum) -> float | None:
    """Return the privacy loss of a sum; None for an exact one."""
    epsilon: object = stored.record["epsilon"]
    return epsilon if isinstance(epsilon, int | float) else None


def noise_of(epsilon: float | None) -> str:
    """Return a description of a sum's noise."""
    return "without noise" if epsilon is None else f"with noise of ε = {epsilon:g}"


def members_of(stored: SecureSum) -> Sequence[str]:
    """Return the clients whose inputs are in a sum."""
    clients: object = stored.record["clients"]
    return list(clients) if isinstance(clients, Mapping) else []


# Cells of clients ---------------------------------------------------------------------------------
# Public randomness divides the clients into groups (cells). Each cell is summed securely, once per
# version of its clients' data. The coordinator learns only the sums over cells. Selectors use a
# cell's mean as the label counts of each client in the cell.

_SHOWN = 3


class LabelCells(SecureLabelSums):
    """Label counts by cell, summed before the first selection and when clients join."""

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
                'disclosure = "cells": the sum failed for every cell of these clients; the '
                "messages of this run give the reasons"
            )

    async def _read_stored(self) -> None:
        for each in reversed(await self._stored(SumKind.CELLS)):
            members = members_of(each)
            if self._is_current(each) and not any(client in self._counts for client in members):
                self._use(members, np.array(each.total, dtype=np.float64))

    def _use(self, members: Sequence[str], total: Counts) -> None:
        total = total.clip(min=0.0)  # noise can make counts negative
        for client in members:
            self._counts[client] = total / len(members)
        self.totals = total if self.totals is None else self.totals + total

    async def _sum(self, clients: Sequence[str], present: Callable[[str], bool]) -> None:
        """Sum each of these clients' cells, if enough members of the cell are connected.

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
                        f"a cell has {len(cell)} clients, of which {len(here)} are connected "
                        f"without a sum: {listed(here, _SHOWN)}; their hosts are too few, so the "
                        "sum waits for more clients",
                        warning=True,
                    )
            if waiting:
                self._say(
                    f"no sum for {listed(sorted(waiting), _SHOWN)}: cells are drawn from "
                    f"{len(hosts)} members on {len(set(hosts.values()))} hosts, and no cell "
                    "includes these clients",
                    warning=True,
                )

    async def _sum_cell(
        self, cell: Sequence[str], drawn: int, present: Callable[[str], bool]
    ) -> None:
        terms = sum_terms(self._run_id, self._plan, SumKind.CELLS)
        try:
            outcome = await self._sums.sum_counts(terms, cell, present=present)
        except RunError as error:
            self._say(f"a cell of {len(cell)} clients has no sum: {error.message}", warning=True)
            return
        if outcome.total is None:
            why = outcome.explain()
            self._say(f"a cell of {len(cell)} clients has no sum: {why}", warning=True)
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
            self._say(
                f"clients missing in the sum of their cell: {listed(left_out, _SHOWN)}{why}",
                warning=True,
            )


# The total over all clients -----------------------------------------------------------------------
# An earlier sum for the same task and data versions is reused, no matter which clients are
# connected: clients allow one exact sum per data version, and a noisy sum costs privacy budget. The
# reused sum does not include clients that joined later.


class LabelTotals(SecureLabelSums):
    """The sum of the label counts over the federation, found once in a run."""

    _tried = False

    async def find(self, clients: Sequence[str], present: Callable[[str], bool]) -> None:
        """Find or compute the sum over these clients. If there is none, record the reason."""
        if self._tried:
            return
        self._tried = True
        stored = self._usable(await self._stored(SumKind.TOTAL), clients)
        if stored is not None:
            self._reuse(stored, clients)
            return
        if not self._sums.possible:
            self._do_without("the federation has no root; create one with `potluck pki root`")
            return
        terms = sum_terms(self._run_id, self._plan, SumKind.TOTAL)
        try:
            outcome = await self._sums.sum_counts(terms, clients, present=present)
        except RunError as error:
            self._do_without(error.message)
            return
        if outcome.total is None:
            self._do_without(outcome.explain())
            return
        self.totals = outcome.total.astype(np.float64)
        self._announce(outcome)

    def _usable(self, stored: Sequence[SecureSum], clients: Sequence[str]) -> SecureSum | None:
        """Return the sum that this run computed, or the newest usable sum of other runs."""
        own = [each for each in stored if each.run_id == self._run_id]
        if own:
            return own[0]
        return next((each for each in reversed(stored) if self._holds(each, clients)), None)

    def _holds(self, stored: SecureSum, clients: Sequence[str]) -> bool:
        """Return True if a sum is of current data, and includes enough of these clients.

        An exact sum always does, since a second one is impossible. A noisy sum can be repeated, at
        the cost of ε for all clients. So it is reused unless it lacks more than half of these
        clients.
        """
        covered = set(clients).intersection(members_of(stored))
        enough = epsilon_of(stored) is None or 2 * len(covered) >= len(clients)
        return enough and self._is_current(stored)

    def _reuse(self, stored: SecureSum, clients: Sequence[str]) -> None:
        self.totals = np.array(stored.total, dtype=np.float64)
        members = members_of(stored)
        self._say(
            f"target of the selector: the secure sum over {len(members)} clients that run "
            f"{stored.run_id} computed, {noise_of(epsilon_of(stored))}"
        )
        late = sorted(set(clients).difference(members))
        if late:
            self._say(
                f"the selector's target does not include {listed(late, _SHOWN)}: an earlier sum "
                "is used again as long as the data of its clients stay the same",
                warning=True,
            )

    def _announce(self, outcome: SumOutcome) -> None:
        record = outcome.record
        self._say(
            f"target of the selector: a secure sum of label counts over {len(record.clients)} "
            f"clients on {record.hosts} hosts, {noise_of(record.epsilon)} "
            f"({self._trust_statement()})"
        )
        whys = {**record.refusals, **outcome.troubles}
        if whys:
            shown = "; ".join(f"{client} ({why})" for client, why in list(whys.items())[:_SHOWN])
            self._say(f"clients missing in the secure sum: {shown}", warning=True)

    def _do_without(self, why: str) -> None:
        """Continue without a sum. Raises RunError if the selector can't work without it."""
        if self._profiles.disclosure == UNSAFE_STEPWISE:
            raise RunError(
                f"no secure sum of label counts, and the selector has no other target: {why}; "
                "start a run with selector dc-balanced, whose target is the same number of "
                "samples of each class"
            )
        self._say(
            "no secure sum of label counts, so the selector's target is the sum of noisy counts: "
            f"{why}",
            warning=True,
        )
