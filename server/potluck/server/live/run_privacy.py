"""The privacy loss of a run with `[privacy]`, computed when a round is committed."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from potluck.common.errors import PluginError
from potluck.common.records.privacy_loss import (
    ACCOUNT,
    ALL_RUNS_BUDGET_SPENT,
    BUDGET_SPENT,
    NEAR_LIMIT,
    NO_ANSWER,
    RUN_BUDGET_SPENT,
    RoundPrivacy,
    TrainingsSent,
)
from potluck.common.settings.plugins import integration
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.hosts.instructions import privacy_terms
from potluck.server.plan.plan import RunPlan
from potluck.server.plan.pretraining import pretraining_id
from potluck.server.store import Store
from potluck.server.store.store_thread import InStore

_SPENT = (BUDGET_SPENT, NO_ANSWER, RUN_BUDGET_SPENT, ALL_RUNS_BUDGET_SPENT)


class RunPrivacy:
    """Computes a run's privacy loss, as far as the coordinator can know it.

    Counts the updates that have arrived, in all attempts and in pre-training.
    """

    def __init__(
        self, run_id: str, plan: RunPlan, in_store: InStore, warn: Callable[[str], None]
    ) -> None:
        self._run_id = run_id
        self._plan = plan
        self._in_store = in_store
        self._warn = warn
        self._computes = True
        self._known: Mapping[str, float] = {}

    async def after_round(
        self, left_out: Mapping[str, str], charged: Mapping[str, float] | None = None
    ) -> RoundPrivacy | None:
        """Return the privacy loss so far; None for a run without `[privacy]`.

        left_out: the excluded clients, with reasons. charged: ε by client, if the coordinator adds
        the noise and keeps the ledger.
        """
        run_file = self._plan.run_file
        if run_file.privacy is None:
            return None
        settings = run_file.privacy
        planned = settings.trainings or run_file.rounds
        sent = await self._sent(self._run_id, planned)
        own = Counter[str]()
        for each in sent:
            own[each.client] += each.count
        spent = charged
        if spent is None:
            pretrained = settings.trainings or run_file.profiles.triplet.pretraining_rounds
            sent = [*sent, *await self._sent(pretraining_id(self._run_id), pretrained)]
            asked = privacy_terms(settings, self._plan)
            spent = await asyncio.to_thread(self._spent, asked, sent)
        changed = {c: e for c, e in spent.items() if self._known.get(c) != e}
        self._known = spent
        limit = None if settings.epsilon is None else NEAR_LIMIT * planned
        return RoundPrivacy(
            delta=settings.delta,
            largest=max(spent.values(), default=None),
            median=statistics.median(spent.values()) if spent else None,
            near_limit=None if limit is None else sum(each >= limit for each in own.values()),
            refused=sum(any(text in why for text in _SPENT) for why in left_out.values()),
            clients=changed,
        )

    async def _sent(self, run_id: str, planned: int) -> list[TrainingsSent]:
        found: list[TrainingsSent] = await self._in_store(
            lambda store: _trainings_sent(store, run_id, planned)
        )
        return found

    def _spent(
        self, asked: coordinator_pb2.Privacy, sent: Sequence[TrainingsSent]
    ) -> Mapping[str, float]:
        """Return ε by client; empty if the libraries are missing. The first call blocks for
        seconds."""
        if not self._computes:
            return {}
        try:
            found = integration(ACCOUNT)(
                asked, self._plan.training, self._plan.run_file.weighting, sent
            )
        except (PluginError, ModuleNotFoundError) as error:
            self._computes = False
            self._warn(f"the coordinator can't show the privacy loss ε of this run: {error}")
            return {}
        return {str(client): round(float(each), 6) for client, each in found.items()}


def _trainings_sent(store: Store, run_id: str, planned: int) -> list[TrainingsSent]:
    return [
        TrainingsSent(client=client, samples=samples, epochs=epochs, count=count, planned=planned)
        for client, samples, epochs, count in store.updates_arrived(run_id)
    ]
