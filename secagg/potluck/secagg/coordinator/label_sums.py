"""Label counts of a run's clients, from secure sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from potluck.common.disclosure import SumKind, TaskReference, canonical_json
from potluck.common.run_file.run_settings import ProfileSettings
from potluck.secagg.coordinator.counts import SecureSums
from potluck.secagg.coordinator.sum_session import SumTerms
from potluck.server.eligibility.collected_sums import LabelSums, Say
from potluck.server.hosts.instructions import task_plugin
from potluck.server.profiles.trust import Trust
from potluck.server.rounds.plan import RunPlan
from potluck.server.store import SecureSum


class SecureLabelSums(LabelSums):
    """The label counts of one run: base class of totals and cells."""

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
        """Return stored sums of the run's task that have at most the run's noise, oldest first."""
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
        """Return True if a sum is of the current data epochs of its connected members."""
        attendance = self._sums.attendance
        sessions = {client: attendance.session_of(client) for client in members_of(stored)}
        return all(
            session is None or session.data_epoch == stored.epochs.get(client)
            for client, session in sessions.items()
        )

    def _trust_statement(self) -> str:
        """Return a short text that names from whom a secure sum hides the clients' counts."""
        if self._trust.independent:
            return "holds against a lying coordinator"
        return "holds against an honest-but-curious coordinator: one party keeps both roots"


def task_reference(plan: RunPlan) -> str:
    """Return the task whose labels are counted, as one text."""
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
    """Return the ε of a run's totals and cells; None if they must be exact."""
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
