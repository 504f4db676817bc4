"""The end of a round: combines its updates, evaluates the new model and commits the round."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import TrainerError
from potluck.common.interruptible import in_thread, shielded
from potluck.common.learning.measures import TRAINING, MeasuredModel, MeasureSums
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.learning.spread import Coverage, Spread
from potluck.common.net.build_version import software_versions
from potluck.common.process.memory import give_back_freed_memory
from potluck.rpc.v1 import operator_pb2
from potluck.server.clock import now, utc
from potluck.server.hosts.gather import announce_closed
from potluck.server.hosts.held_out_evaluation import HeldOut, evaluate_on_clients
from potluck.server.live.cohort_labels import cohort_labels, heterogeneity
from potluck.server.live.feed import committed_round_message
from potluck.server.live.live_status import publish_status
from potluck.server.live.models import RoundModel, States, write_states
from potluck.server.live.run import Run
from potluck.server.machine import events as rounds
from potluck.server.machine.roster import RunRoster
from potluck.server.plan.plan import RunPlan
from potluck.server.reduce.model_work import ModelWork
from potluck.server.select.selection_record import SelectionRecord
from potluck.server.selection import RoundOutcome
from potluck.server.store import Store
from potluck.server.store.model_files import ModelVersion
from potluck.server.store.records import (
    AttemptKey,
    BestSoFar,
    LateRow,
    LateState,
    MemberState,
    Metrics,
    RoundCommit,
    RoundRow,
    RunRow,
    UpdateRow,
)
from potluck.server.updates.report_checks import (
    TRAINING_LOSS,
    loss_coverage,
    training_coverage,
    training_loss,
    training_means,
    wants_training_loss,
)
from potluck.server.updates.update_path import UpdatePath


async def reduce(run: Run, path: UpdatePath, clients: tuple[str, ...]) -> None:
    """Combine the updates of these clients, in this order, into the round's model."""
    updates = [run.updates.received[client] for client in clients]
    run.updates.join(_simulated_seconds(run, clients), run.machine.pool.selectable)
    # return freed memory to the system before combining the updates, which needs much memory
    await asyncio.to_thread(give_back_freed_memory)
    result = await path.reduce(updates)
    if result is not None:
        run.models.result = result
        for client, reason in _set_aside(run.models.result, run.roster).items():
            run.say(f"round {run.machine.round}: the update of {client} is excluded: {reason}")
        run.post(rounds.Reduced())


async def evaluate(run: Run) -> None:
    """Evaluate the round's model on the coordinator's data, or on the clients' data if the
    coordinator has none."""
    model, own_failed = run.models.result.model, False
    counts: EvaluationCounts | MeasureSums | None = None
    try:
        counts = await _on_own_data(run.plan, run.models.work, model)
    except TrainerError as error:  # the round is committed without metrics: its model is valid
        run.record.warn(f"round {run.machine.round} is not evaluated: {error.message}")
        own_failed = True
    wanted = list(run.plan.client_models)
    on_clients = counts is None and not own_failed
    if on_clients and MeasuredModel.ROUND not in wanted:
        wanted.insert(0, MeasuredModel.ROUND)
    metrics = {} if counts is None else counts.means()
    spreads: dict[str, Spread] = {}
    coverage: dict[str, Coverage] = {}
    if counts is not None:
        coverage = {name: Coverage(samples=of) for name, of in counts.counted.items() if of}
    for subject in wanted:
        found = await _on_clients(run, model, subject)
        if on_clients or subject is not MeasuredModel.ROUND:
            metrics |= found.metrics
            coverage |= found.coverage
        spreads |= found.spreads
    infinite = sorted(name for name, of in coverage.items() if of.samples and name not in metrics)
    if infinite:
        run.record.warn(
            f"round {run.machine.round}: infinite, so not shown: {', '.join(infinite)}; the model "
            "may have diverged: lower training.learning_rate"
        )
    run.models.result = replace(
        run.models.result, metrics=metrics, spreads=spreads, coverage=coverage
    )
    run.post(rounds.Evaluated())


async def _on_clients(run: Run, model: ModelVersion, subject: MeasuredModel) -> HeldOut:
    """Evaluate the round's model, or one that clients derive from it, on the held-out samples of
    all connected clients."""
    return await evaluate_on_clients(
        run.services.attendance,
        run.plan,
        run.key,
        model,
        run.machine.pool.present(now()),
        seconds=run.plan.run_file.round.deadline_seconds,
        present=run.is_present,
        kept=partial(run.kept_state, of_result=True),
        warn=run.record.warn,
        subject=subject,
    )


async def _on_own_data(
    plan: RunPlan, work: ModelWork, model: ModelVersion
) -> EvaluationCounts | MeasureSums | None:
    """Evaluate the model on the coordinator's data; return None if it has none.

    Raises TrainerError if the task's own trainer takes longer than a round's deadline.
    """
    seconds = None if plan.trainer is None else plan.run_file.round.deadline_seconds
    try:
        async with asyncio.timeout(seconds):
            return await in_thread(work.evaluate, model)
    except TimeoutError:
        raise TrainerError(
            f"the trainer of task '{plan.run_file.task.name}' has not evaluated the model within "
            f"{seconds:g} s; check why the evaluation takes so long, or raise "
            "round.deadline_seconds"
        ) from None


async def commit(
    run: Run, action: rounds.Commit, record: SelectionRecord, post_commit: PostCommitTasks
) -> None:
    """Commit the round: first write its states to disk, then store its row."""
    result, outcome = run.models.result, _outcome(run, action)
    set_aside = _set_aside(result, run.roster)
    included = tuple(client for client in action.included if client not in set_aside)
    late = _close_late(run, action)
    selector_state = run.plan.selector.observe(run.models.states.selector, outcome)
    states = States(selector=selector_state, strategy=result.strategy_state)
    state_blake3 = await in_thread(write_states, run.services.files, states)
    await record.committing(selector_state, run.key, outcome)
    trained, of_trainings = _of_trainings(
        run.plan, result, [run.updates.received[client].row for client in included]
    )
    metrics = {**result.metrics, **trained}
    coverage = {**result.coverage, **of_trainings}
    round_commit = RoundCommit(
        key=run.key,
        model_blake3=result.model.blake3,
        state_blake3=state_blake3,
        selector_scalars=states.selector.scalars,
        strategy_scalars=states.strategy.scalars,
        metrics=metrics,
        spreads=result.spreads,
        seconds=_round_seconds(run, action.included),
        bytes_down=run.updates.bytes_down,
        bytes_up=run.updates.bytes_up,
        committed_at=utc(),
        included=included,
        set_aside=set_aside,
        late=late,
        best=_best(run, metrics, coverage),
        software=dict(software_versions()),
        coverage=coverage,
        privacy=await run.privacy.after_round(run.selecting.left_out.troubles, result.spent),
    )
    await post_commit.settled()
    # A stored round is announced, even if the run is being stopped.
    await shielded(_store(run, round_commit, states, post_commit))
    run.post(rounds.Committed(run.why_over(round_commit.best)))


async def _store(
    run: Run, round_commit: RoundCommit, states: States, post_commit: PostCommitTasks
) -> None:
    in_store = run.services.in_store
    await in_store(lambda store: store.commit_round(round_commit))
    row, run.record.row = await in_store(partial(_committed, key=run.key))
    run.models.commit(states)
    run.note_committed(row)
    awaited = [each.client_id for each in run.updates.late.awaited if each.key == row.key]
    announce_closed(run.services.attendance, row, awaited)
    run.updates.let_go([each for each in round_commit.late if each.state is LateState.DROPPED])
    run.services.observer.late(round_commit.late)
    run.updates.post_awaited()
    _announce(run, row)
    updates = run.updates.received
    post_commit.begin(
        row,
        [*{update.path: None for c, update in updates.items() if c not in awaited}],
        round_commit.late,
    )


def _best(run: Run, metrics: Metrics, coverage: Mapping[str, Coverage]) -> BestSoFar | None:
    """Return the best value of the metric in `[stop]` up to and including the round being
    committed.

    A metric that only some clients measured changes neither the best model nor the number of
    evaluations without improvement.
    """
    rule, so_far, number = run.plan.stop_rule, run.row.best, run.machine.round
    if rule is None or number <= rule.opening:
        return None
    measured = rule.measure.startswith(TRAINING) or run.machine.rules.evaluates(number)
    if not measured or coverage.get(rule.measure, Coverage()).partial:
        return so_far
    value = metrics.get(rule.measure)
    if value is None and (so_far is None or not so_far.stalled):
        run.say(
            f"round {number} has no value of {rule.measure}, which decides about the best model "
            "and about [stop]; this counts as no improvement",
            warning=True,
        )
    return rule.after(so_far, number, value)


def _close_late(run: Run, action: rounds.Commit) -> Sequence[LateRow]:
    """Record which late updates are part of the round, and which are awaited from now on."""
    return run.updates.close_round(
        run.key,
        run.models.result.late_weights,
        run.machine.cohort.missed,
        model_blake3=run.models.current.blake3,
        round_seconds=_simulated_seconds(run, action.included),
        work={client: each.work for client, each in run.attempt.cohort.items()},
    )


def _set_aside(result: RoundModel, roster: RunRoster) -> Mapping[str, str]:
    """Return the clients whose updates the selector excluded from the model, each with the
    reason."""
    aside = result.judgement.set_aside
    rows = np.array(sorted(aside), dtype=np.int64)
    return dict(zip(roster.clients(rows), [aside[row] for row in rows.tolist()], strict=True))


_UNASKED: Final[NDArray[np.int64]] = np.zeros(0, dtype=np.int64)


def _outcome(run: Run, action: rounds.Commit) -> RoundOutcome:
    cohort = _awaited(run)
    updates = run.updates.received
    # Updates that arrived but were not included are ignored: after a kill, their arrival is
    # unknown.
    rows = [updates[c].row if c in action.included else None for c in cohort]
    late = run.updates.joining
    names = ["loss", *sorted(run.plan.reports)]
    reports = {name: np.array([_reported(row, name) for row in rows]) for name in names}
    seconds = np.array([math.nan if row is None else row.seconds for row in rows])
    judgement = run.models.result.judgement
    came = run.roster.rows(action.included)
    return RoundOutcome(
        round=action.round,
        selected=run.roster.rows(cohort),
        cohort=run.roster.rows(list(run.attempt.cohort)),
        included=came[~np.isin(came, list(judgement.set_aside))],
        samples=run.selecting.samples() if run.plan.selector.needs_facts else _UNASKED,
        spared=run.roster.rows([client for client in cohort if client in run.attempt.spared]),
        seconds=seconds,
        reports=reports,
        answers=tuple(run.attempt.answers),
        deadline_seconds=_deadline(run.plan, seconds),
        late=run.roster.rows([row.client_id for row in late]),
        late_seconds=np.array([row.update.seconds for row in late if row.update], np.float64),
        facts=run.models.result.facts,
        judgement=judgement,
        prolonged=_prolonged(run, cohort),
    )


def _awaited(run: Run) -> list[str]:
    """Return the cohort without the clients that over-selection made unnecessary: they neither
    failed nor took long, and an update of theirs may have been on its way."""
    members, skipped = run.machine.cohort.members, run.attempt.spared
    return [
        client
        for client in run.attempt.cohort
        if members[client].state is not MemberState.SPARED or client in skipped
    ]


def _prolonged(run: Run, cohort: Sequence[str]) -> NDArray[np.float64]:
    """Return each client's number of passes over its samples, divided by `training.epochs`, in
    cohort order; empty if the selector set no number of passes."""
    epochs = [run.attempt.cohort[client].work.epochs for client in cohort]
    if not any(epochs):
        return np.zeros(0)
    usual = run.plan.training.epochs
    return np.array([1.0 if each is None else each / usual for each in epochs])


def _deadline(plan: RunPlan, seconds: NDArray[np.float64]) -> float:
    """Return the seconds after which a client counts as failed. seconds: durations of the cohort's
    trainings, not all NaN."""
    run_file = plan.run_file
    if not run_file.virtual_clock.enabled:
        return run_file.round.deadline_seconds
    return run_file.virtual_clock.deadline_seconds or float(np.nanmax(seconds))


def _round_seconds(run: Run, included: Sequence[str]) -> float:
    """Return the duration of the round; on a virtual clock, the round ends with the last update
    that is in time. With a trace, it includes the time until enough clients were available."""
    if not run.plan.run_file.virtual_clock.enabled:
        return now() - run.attempt.begun
    seconds = _simulated_seconds(run, included)
    return seconds if run.trace_clock is None else run.trace_clock.seconds(seconds)


def _simulated_seconds(run: Run, included: Sequence[str]) -> float:
    """Return the round's duration on a virtual clock; 0 on a real clock. included: clients whose
    update arrived in time.

    The round ends with the last update that it waits for. It lasts the whole deadline only if fewer
    updates arrived in time.
    """
    if not run.plan.run_file.virtual_clock.enabled:
        return 0.0
    seconds = np.array([run.updates.received[client].row.seconds for client in included])
    enough = len(included) >= run.machine.cohort.wanted
    return float(seconds.max()) if enough else _deadline(run.plan, seconds)


def _announce(run: Run, row: RoundRow) -> None:
    """Publish a committed round to watchers and to the metrics."""
    observer = run.services.observer
    run.log.info("committed", round=row.key.round, seconds=round(row.seconds, 3))
    run.record.feed.publish(operator_pb2.WatchRunResponse(committed=committed_round_message(row)))
    publish_status(run)
    observer.committed(row, run.models.current.size)
    observer.picks(*run.selecting.eligibility.picks.summary(), row.key.round)
    observer.largest_weight(run.selecting.alarms.largest_weight)
    observer.privacy(run.selecting.profiling.largest_epsilon)


class PostCommitTasks:
    """Background work after a commit, done while the next round runs. Used on the event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._task: asyncio.Task[None] | None = None

    def begin(self, row: RoundRow, spent: Sequence[Path], late: Sequence[LateRow]) -> None:
        """Start the work after a commit. spent: files of the round's updates, no longer needed.
        late: rows of late trainings that the commit changed."""
        self._task = asyncio.create_task(self._follow(row, spent, late))

    async def settled(self) -> None:
        """Wait until the work is done. Raises the error with which the work failed."""
        if self._task is not None:
            await asyncio.shield(self._task)  # the work continues if the caller is cancelled

    def stop(self) -> None:
        """Cancel the work, because this coordinator no longer drives the run."""
        if self._task is not None:
            self._task.cancel()

    async def _follow(self, row: RoundRow, spent: Sequence[Path], late: Sequence[LateRow]) -> None:
        run = self._run
        await run.services.note_commit(row)
        await run.updates.judge_offenders()
        spool, kept = run.updates.spool, run.updates.kept_clients()
        over = {(each.round, each.attempt) for each in late} - {row.key[1:]}
        await asyncio.to_thread(spool.clear, *row.key[1:], spent, keep=kept.get(row.key[1:], ()))
        for attempt in sorted(over):
            await asyncio.to_thread(spool.clear_some, *attempt, keep=kept.get(attempt, ()))
        await self._observe(row)
        norm = await run.models.last_step()
        if norm is not None:
            run.services.observer.moved(norm)
        await run.services.tidy(row.key.round)

    async def _observe(self, row: RoundRow) -> None:
        """Update the metrics about the labels and the heterogeneity of the clients' data."""
        run, observer = self._run, self._run.services.observer
        included = [member.client_id for member in row.included]
        population, rows = run.selecting.population(), {row.key.round: run.roster.rows(included)}
        if population.label_counts is not None:
            labels = await asyncio.to_thread(cohort_labels, population.label_counts, rows)
            observer.cohort(labels)
        if run.selecting.profiling.needs and run.selecting.profiling.changed_since_last_asked():
            observer.heterogeneity(await asyncio.to_thread(heterogeneity, population))


def _committed(store: Store, *, key: AttemptKey) -> tuple[RoundRow, RunRow]:
    """Return the committed round, and the row of its run."""
    [row] = store.rounds(key.run_id, after=key.round - 1, limit=1)
    return row, store.run(key.run_id)


def _reported(row: UpdateRow | None, name: str) -> float:
    """Return a number that a client reported with its update; NaN if it is missing."""
    if row is None:
        return math.nan
    value = row.loss if name == "loss" else row.reports.get(name)
    return math.nan if value is None else value


def _of_trainings(
    plan: RunPlan, result: RoundModel, reports: Sequence[UpdateRow]
) -> tuple[dict[str, float], dict[str, Coverage]]:
    """Return metrics of the trainings whose updates are in the model, and how many of them
    reported each metric."""
    means, coverage = training_means(reports), training_coverage(reports)
    every = plan.run_file.evaluation.every
    if plan.trainer is None and wants_training_loss(result.metrics, every):
        of_sum = result.training_loss
        if of_sum is None:
            means |= training_loss(reports)
            coverage |= loss_coverage(reports)
        else:
            means[TRAINING_LOSS] = of_sum
            samples = sum(each.samples for each in reports)
            coverage[TRAINING_LOSS] = Coverage(
                clients=len(reports), asked=len(reports), samples=samples
            )
    return means, coverage
