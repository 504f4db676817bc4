"""The end of a round: reduce its updates, evaluate the new model, commit, tell the clients."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from potluck.common.interruptible import in_thread
from potluck.common.learning.scores import Metrics
from potluck.common.net.shielded import to_the_end
from potluck.common.process.memory import give_back_freed_memory
from potluck.rpc.v1 import operator_pb2
from potluck.server.aggregation.model_work import States
from potluck.server.clock import now, utc
from potluck.server.cohorts.cohort_labels import cohort_labels, heterogeneity
from potluck.server.hosts.held_out_evaluation import evaluate_on_clients
from potluck.server.rounds import events as rounds
from potluck.server.runs.announce import announce_closed
from potluck.server.runs.masked_rounds import MaskedRounds
from potluck.server.runs.run import RoundModel, Run
from potluck.server.selection import RoundOutcome
from potluck.server.store import Store
from potluck.server.store.records import MetricsRow, RoundCommit, RoundRow, RunRow, UpdateRow
from potluck.server.watching.feed import committed_round_message


class Finishing:
    """The part of a run that makes models of updates, and commits them."""

    def __init__(self, run: Run, masking: MaskedRounds | None = None) -> None:
        self._run = run
        self._masking = masking
        self._in_store = run.services.in_store
        self._aftermath: asyncio.Task[None] | None = None

    async def reduce(self, clients: tuple[str, ...]) -> None:
        """Combine the updates of these clients, in this order, into the round's model."""
        run = self._run
        updates = [run.intake.updates[client] for client in clients]
        await asyncio.to_thread(give_back_freed_memory)  # before more is needed
        if self._masking is not None:
            if not await self._masking.reduce(updates):
                return  # the round learns why
        else:
            model, strategy_state = await in_thread(
                run.work.next_model,
                run.machine.round,
                updates,
                run.model,
                run.states.strategy,
                clients=len(run.roster),
            )
            run.result = RoundModel(model=model, strategy_state=strategy_state)
        run.post(rounds.Reduced())

    async def evaluate(self) -> None:
        """Evaluate the round's model on the coordinator's data, or else on the clients'."""
        run, model = self._run, self._run.result.model
        counts = await in_thread(run.work.evaluate, model)
        if counts is None:
            counts = await evaluate_on_clients(
                run.services.attendance,
                run.plan,
                run.key,
                model,
                run.machine.gathering.present(now()),
                seconds=run.plan.run_file.round.deadline_seconds,
                present=run.is_present,
            )
        if counts is not None:
            run.result = replace(run.result, metrics=counts.metrics())
        run.post(rounds.Evaluated())

    async def commit(self, action: rounds.Commit) -> None:
        """Commit the round: its states are on disk before its row is in the store."""
        run, result = self._run, self._run.result
        outcome = self._outcome(action)
        selector_state = run.plan.selector.observe(run.states.selector, outcome)
        states = States(selector=selector_state, strategy=result.strategy_state)
        state_blake3 = await in_thread(run.work.write_states, states)
        commit = RoundCommit(
            key=run.key,
            model_blake3=result.model.blake3,
            state_blake3=state_blake3,
            selector_scalars=states.selector.scalars,
            strategy_scalars=states.strategy.scalars,
            metrics=_metrics_row(result.metrics),
            seconds=self._round_seconds(outcome),
            bytes_down=run.intake.bytes_down,
            bytes_up=run.intake.bytes_up,
            committed_at=utc(),
            included=action.included,
        )
        await self.settled()
        await to_the_end(self._store(commit, states))  # what is stored is told, also amid a stop
        run.post(rounds.Committed())

    async def _store(self, commit: RoundCommit, states: States) -> None:
        run, result = self._run, self._run.result
        await self._in_store(lambda store: store.commit_round(commit))
        row, run.record.row = await self._in_store(partial(_committed, run_id=run.row.run_id))
        run.model_before, run.model, run.states = run.model, result.model, states
        run.remember(row)
        announce_closed(run.services.attendance, row)
        self._announce(row)
        spent = [update.path for update in run.intake.updates.values()]
        self._aftermath = asyncio.create_task(self._after_commit(row, spent))

    async def settled(self) -> None:
        """Wait until what follows a commit is done. Raises what went wrong there."""
        if self._aftermath is not None:
            await asyncio.shield(self._aftermath)  # it goes on where whoever waits is cancelled

    def stop(self) -> None:
        """The coordinator stops."""
        if self._aftermath is not None:
            self._aftermath.cancel()

    def _outcome(self, action: rounds.Commit) -> RoundOutcome:
        run, cohort = self._run, list(self._run.attempt.cohort)
        updates = run.intake.updates
        # Of those left out nothing counts, whether it came: after a kill it is not known.
        rows = [updates[c].row if c in action.included else None for c in cohort]
        names = ["loss", *sorted(run.plan.reports)]
        reports = {name: np.array([_reported(row, name) for row in rows]) for name in names}
        seconds = np.array([math.nan if row is None else row.seconds for row in rows])
        return RoundOutcome(
            round=action.round,
            selected=run.roster.rows(cohort),
            included=run.roster.rows(action.included),
            seconds=seconds,
            reports=reports,
            answers=tuple(run.attempt.answers),
            deadline_seconds=self._deadline(seconds),
        )

    def _deadline(self, seconds: NDArray[np.float64]) -> float:
        """What those that failed took at least. seconds: of the others, one of them not NaN."""
        run_file = self._run.plan.run_file
        if not run_file.virtual_clock.enabled:
            return run_file.round.deadline_seconds
        return run_file.virtual_clock.deadline_seconds or float(np.nanmax(seconds))

    def _round_seconds(self, outcome: RoundOutcome) -> float:
        """How long the round took; on a virtual clock, until the last one in time."""
        if not self._run.plan.run_file.virtual_clock.enabled:
            return now() - self._run.attempt.begun
        everybody = len(outcome.included) == len(outcome.selected)
        return float(np.nanmax(outcome.seconds)) if everybody else outcome.deadline_seconds

    def _announce(self, row: RoundRow) -> None:
        """Tell people and metrics of a committed round."""
        run, observer = self._run, self._run.services.observer
        run.log.info("committed", round=row.key.round, seconds=round(row.seconds, 3))
        run.record.feed.publish(
            operator_pb2.WatchRunResponse(committed=committed_round_message(row))
        )
        run.publish_status()
        observer.committed(row, run.model.size)
        observer.picks(*run.eligibility.picks.summary(), row.key.round)
        observer.largest_weight(run.alarms.largest_weight)
        observer.privacy(run.profiling.largest_epsilon)

    async def _after_commit(self, row: RoundRow, spent: Sequence[Path]) -> None:
        """What nobody waits for: the next round has begun."""
        run = self._run
        await run.services.note_commit(row)
        await run.judge_offenders()
        await asyncio.to_thread(run.spool.clear, row.key.round, row.key.attempt, spent)
        await self._observe(row)
        if run.model_before is not None:
            norm = await in_thread(run.work.step_norm, run.model_before, run.model)
            run.services.observer.moved(norm)
            run.model_before = None
        await run.services.tidy(row.key.round)

    async def _observe(self, row: RoundRow) -> None:
        """Tell the metrics whose data the round was of."""
        run, observer = self._run, self._run.services.observer
        included = [member.client_id for member in row.included]
        population, rows = run.population(), {row.key.round: run.roster.rows(included)}
        if population.label_counts is not None:
            labels = await asyncio.to_thread(cohort_labels, population.label_counts, rows)
            observer.cohort(labels)
        if run.profiling.needs and run.profiling.changed_since_last_asked():
            observer.heterogeneity(await asyncio.to_thread(heterogeneity, population))


def _committed(store: Store, *, run_id: str) -> tuple[RoundRow, RunRow]:
    """The round that was just committed, and where its run stands now."""
    row = store.last_round(run_id)
    assert row is not None  # noqa: S101  # it has just been committed
    return row, store.run(run_id)


def _reported(row: UpdateRow | None, name: str) -> float:
    """A number that came with an update; NaN where it didn't."""
    if row is None:
        return math.nan
    value = row.loss if name == "loss" else row.reports.get(name)
    return math.nan if value is None else value


def _metrics_row(metrics: Metrics | None) -> MetricsRow:
    return MetricsRow() if metrics is None else MetricsRow(**_by_name(metrics))


def _by_name(metrics: Metrics) -> Mapping[str, float | None]:
    """A model's metrics by name."""
    return {
        "loss": metrics.loss,
        "accuracy": metrics.accuracy,
        "worst_group_accuracy": metrics.worst_group_accuracy,
        "weighted_f1": metrics.weighted_f1,
    }
