"""The label counts of the whole federation, which some selectors steer by: one secure sum.

Lives on the event loop. A sum that was released before, of the same task and the same versions of
the clients' data, is used again: a second one, over a few clients more or less, would give these
away, and clients would refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.common.disclosure import SumKind, TaskReference, canonical_json
from potluck.common.errors import RunError
from potluck.common.learning.step_by_step import PROTOCOL
from potluck.server.hosts.instructions import task_plugin
from potluck.server.runs.run import Run
from potluck.server.store import SecureSum
from potluck.server.sums.counts import SumOutcome
from potluck.server.sums.sum_session import SumTerms


class LabelTotals:
    """The part of a run that asks for the federation's label counts."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._profiles = run.plan.run_file.profiles
        self._tried = False
        self._task = task_reference(run)

    @property
    def _wanted(self) -> bool:
        wants = self._run.plan.selector.wants_label_totals
        return wants and self._profiles.disclosure in ("noisy", PROTOCOL)

    async def find(self, clients: Sequence[str]) -> None:
        """Have the sum over these clients ready, once in a run; without one, say why.

        Raises RunError where the run can't go on without.
        """
        if self._tried or not self._wanted:
            return
        self._tried = True
        run = self._run
        found = await self._stored(clients)
        if found is not None:
            self._use(found)
            return
        if not run.services.sums.possible:
            self._do_without("the federation has no root; see `potluck pki root`")
            return
        try:
            outcome = await run.services.sums.sum_counts(
                sum_terms(run, SumKind.TOTAL), clients, present=run.is_present
            )
        except RunError as error:
            self._do_without(error.message)
            return
        if outcome.total is None:
            self._do_without(outcome.explain())
            return
        run.label_totals = outcome.total.astype(np.float64)
        self._announce(outcome)

    async def _stored(self, clients: Sequence[str]) -> SecureSum | None:
        """The newest sum that still holds: this run's own, or one of the same data."""
        run = self._run
        stored: list[SecureSum] = await run.services.in_store(
            lambda store: store.sums(kind=SumKind.TOTAL.value)
        )
        usable = [each for each in stored if each.total is not None and each.task == self._task]
        own = [each for each in usable if each.run_id == run.row.run_id]
        if own:
            return own[0]
        return next((each for each in reversed(usable) if self._holds(each, clients)), None)

    def _holds(self, stored: SecureSum, clients: Sequence[str]) -> bool:
        """Whether a sum is of data as they are, over as good as all of these clients."""
        members = set(members_of(stored))
        if not is_current(self._run, stored):
            return False
        apart = members.symmetric_difference(clients)
        attendance = self._run.services.attendance
        sessions = {client: attendance.session_of(client) for client in apart}
        hosts = {each.host_id if each else client for client, each in sessions.items()}
        return len(hosts) < self._profiles.sum_hosts

    def _use(self, stored: SecureSum) -> None:
        total: NDArray[np.float64] = np.array(stored.total, dtype=np.float64)
        self._run.label_totals = total
        self._run.say(
            f"target: the secure sum over {len(members_of(stored))} clients of run {stored.run_id}"
        )

    def _announce(self, outcome: SumOutcome) -> None:
        record = outcome.record
        holds = trust_statement(independent=self._run.services.trust.independent)
        self._run.say(
            f"target: a secure sum of label counts over {len(record.clients)} clients on "
            f"{record.hosts} hosts ({holds})"
        )
        if record.refusals or outcome.troubles:
            whys = {**outcome.troubles, **record.refusals}
            told = "; ".join(f"{client} ({why})" for client, why in list(whys.items())[:3])
            self._run.say(f"not in the sum: {told}", warning=True)

    def _do_without(self, why: str) -> None:
        """Raises RunError where there is nothing else to steer by."""
        if self._profiles.disclosure == PROTOCOL:
            raise RunError(
                f"no secure sum of label counts, and the target is nothing else: {why}; start a "
                "run with dc-balanced, whose target is the same number of samples of each class"
            )
        self._run.say(
            f"no secure sum of label counts, the target is the sum of noisy ones: {why}",
            warning=True,
        )


def task_reference(run: Run) -> str:
    """The task whose labels are counted, as one text."""
    task = run.plan.run_file.task
    reference = TaskReference(name=task.name, options=task.options)
    return canonical_json(reference.model_dump(mode="json"))


def sum_terms(run: Run, kind: SumKind) -> SumTerms:
    """What a run asks for with a sum of label counts."""
    run_file = run.plan.run_file
    profiles = run_file.profiles
    return SumTerms(
        run_id=run.row.run_id,
        kind=kind,
        subject=f"label counts of {run_file.task.name}",
        task=task_plugin(run_file),
        task_reference=task_reference(run),
        classes=run.plan.task.classes,
        least_hosts=profiles.sum_hosts,
        colluding_hosts=profiles.sum_colluding_hosts,
        stage_seconds=profiles.sum_stage_seconds,
        epsilon=profiles.sum_epsilon,
        sensitivity=1 if profiles.adjacency == "add-remove" else 2,
    )


def is_current(run: Run, stored: SecureSum) -> bool:
    """Whether a sum is of the versions of the data that its members have now, as far as they
    attend."""
    attendance = run.services.attendance
    sessions = {client: attendance.session_of(client) for client in members_of(stored)}
    return all(
        session is None or session.data_epoch == stored.epochs.get(client)
        for client, session in sessions.items()
    )


def trust_statement(*, independent: bool) -> str:
    """Against whom a secure sum holds, in a few words."""
    if independent:
        return "holds against a lying coordinator"
    return "holds against an honest-but-curious coordinator: one party keeps both roots"


def members_of(stored: SecureSum) -> Sequence[str]:
    """Whose inputs are in a sum."""
    clients = stored.record["clients"]
    return list(clients) if isinstance(clients, dict) else []
