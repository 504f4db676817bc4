"""One run under way: feeds the state machine what happens and carries out what it answers.

Lives on the event loop. Blocking work goes to threads: the store's calls to its one thread, the
heavy part of a round (`round_work.py`) to any. What the coordinator acts on is stored first.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog

from potluck.common.errors import NotFoundError, PotluckError, RunError
from potluck.common.scores import Metrics
from potluck.rpc.v1 import coordinator_pb2, operator_pb2
from potluck.server import round_events as rounds
from potluck.server.attendance import Attendance
from potluck.server.blueprint import Blueprint
from potluck.server.evaluating import evaluate_on_clients
from potluck.server.gatekeeping import Gatekeeper
from potluck.server.model_files import ModelFiles, Published
from potluck.server.news import News, committed_round_message, member_message
from potluck.server.profiling import Profiling, Trust
from potluck.server.round import Phase, Resumption, RoundMachine
from potluck.server.round_work import RoundWork, SpooledUpdate, States, spooled_intact
from potluck.server.selection import Population, RoundOutcome, Selection, SelectionContext
from potluck.server.spool import Spool
from potluck.server.state import State
from potluck.server.store import Store
from potluck.server.store.records import (
    Attempt,
    AttemptKey,
    MemberState,
    RoundCommit,
    RoundRow,
    RunRow,
    RunState,
)
from potluck.server.store.records import Metrics as MetricsRow
from potluck.server.wire import model_reference, train_instruction, train_instruction_id

log = structlog.get_logger()
T = TypeVar("T")

StoreCall = Callable[[Callable[[Store], T]], Awaitable[T]]


def now() -> float:
    """Monotonic seconds."""
    return time.monotonic()


def utc() -> datetime:
    """The time of day, for people."""
    return datetime.now(UTC)


@dataclass(kw_only=True)
class Environment:
    """What a run needs of the coordinator."""

    attendance: Attendance
    files: ModelFiles
    in_store: Callable[[Callable[[Store], Any]], Awaitable[Any]]
    """Call with the store in its thread."""
    tidy: Callable[[], Awaitable[None]]
    """Delete model files that no run needs any more."""
    pretrain: Callable[[str], Awaitable[str | None]]
    """Train a model before round 1; digests in and out. None where the operator stops it."""
    trust: Trust


@dataclass(kw_only=True)
class _RoundFacts:
    """What is measured of the round under way."""

    begun: float = field(default_factory=now)
    bytes_down: int = 0
    bytes_up: int = 0
    told: dict[str, float] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    updates: dict[str, SpooledUpdate] = field(default_factory=dict)
    cohort: tuple[str, ...] = ()
    available: tuple[str, ...] = ()
    model: Published | None = None
    strategy_state: State | None = None
    metrics: Metrics | None = None


class RunEngine:
    """One run under way."""

    def __init__(
        self,
        row: RunRow,
        blueprint: Blueprint,
        work: RoundWork,
        spool: Spool,
        environment: Environment,
    ) -> None:
        self.row = row
        self.blueprint = blueprint
        self.spool = spool
        self.news = News()
        self.work = work
        self._environment = environment
        self._profiling = Profiling(
            row.run_id, blueprint, environment.attendance, environment.in_store, environment.trust
        )
        self._gate = Gatekeeper(
            blueprint, self._profiling, lambda text: self._say(text, warning=True)
        )
        self._events: asyncio.Queue[rounds.Event] = asyncio.Queue()
        self._prepared = asyncio.Event()
        self._machine = RoundMachine(blueprint.plan)
        self._slow: asyncio.Task[None] | None = None
        self._roster: list[str] = []
        self._row_of: dict[str, int] = {}
        self._samples: dict[str, int] = {}
        self._facts = _RoundFacts()
        self._model: Published | None = None
        self._states = States(selector=State(), strategy=State())
        self._begun_attempt: AttemptKey | None = None
        self._state = RunState.WAITING
        self._stored: Attempt | None = None
        self._log = log.bind(run=row.run_id)

    # What others see --------------------------------------------------------------------------

    @property
    def model(self) -> Published | None:
        """The model clients train from."""
        return self._model

    def status(self) -> operator_pb2.RunStatus:
        """Where the run stands."""
        return self.news.status(self.row)

    def progress(self) -> operator_pb2.RoundProgress | None:
        """The round under way, for people."""
        machine, facts = self._machine, self._facts
        if machine.phase in (Phase.WAITING, Phase.ENDED):
            return None
        members = [self._member(client) for client in facts.cohort]
        return operator_pb2.RoundProgress(
            round=machine.round,
            attempt=machine.attempt,
            phase=machine.phase.value,
            members=members,
            seconds=now() - facts.begun,
        )

    def _member(self, client: str) -> operator_pb2.Member:
        facts, member = self._facts, self._machine.members.get(client)
        pending = self._environment.attendance.pending(self._instruction_id(client))
        return member_message(
            client,
            facts.hosts.get(client, ""),
            facts.reasons.get(client, ""),
            member.state if member else MemberState.SELECTED,
            member.trouble if member else "",
            facts.updates.get(client),
            pending.progress if pending else None,
        )

    # Updates ----------------------------------------------------------------------------------

    async def prepared(self) -> None:
        """Wait until it is known where the run stands; what is expected is not known before."""
        await self._prepared.wait()

    def expects(self, client: str, update_id: str) -> bool:
        """Whether an update with this id is waited for."""
        return client in self._machine.pending and update_id == self._instruction_id(client)

    def has(self, client: str, update_id: str) -> bool:
        """Whether the update with this id is spooled in the attempt under way."""
        return client in self._facts.updates and update_id == self._instruction_id(client)

    def spool_path(self, client: str, sha256: str) -> Path:
        """Where the client's update of this attempt belongs."""
        return self.spool.path(self._machine.round, self._machine.attempt, client, sha256)

    def serves(self, sha256: str) -> bool:
        """Whether hosts fetch this file for this run."""
        return self._model is not None and sha256 in self._model.digests

    def files_in_use(self) -> set[str]:
        """Files that must not be deleted now."""
        return {
            digest
            for model in (self._model, self._facts.model, self._profiling.model)
            if model is not None
            for digest in model.digests
        }

    def count_down(self, sent: int) -> None:
        """Model bytes went out."""
        self._facts.bytes_down += sent

    def count_up(self, received: int) -> None:
        """Update bytes came in."""
        self._facts.bytes_up += received

    async def accept(self, client: str, update_id: str, update: SpooledUpdate) -> None:
        """A verified update is in the spool: record it, then tell the machine."""
        key = self._key
        await self._environment.in_store(
            lambda store: store.set_member(key, client, MemberState.RECEIVED, update=update.row)
        )
        if not self.expects(client, update_id):
            return
        self._facts.updates[client] = update
        self._environment.attendance.retire([update_id])
        self.post(rounds.UpdateArrived(client))

    @property
    def _key(self) -> AttemptKey:
        return AttemptKey(self.row.run_id, self._machine.round, self._machine.attempt)

    def seconds_since_told(self, client: str) -> float:
        """Seconds since the client was told to train."""
        return now() - self._facts.told.get(client, now())

    # Driving ----------------------------------------------------------------------------------

    def post(self, event: rounds.Event) -> None:
        """Something happened."""
        self._events.put_nowait(event)

    async def drive(self) -> None:
        """Go on until the run ends, or the task is cancelled (the coordinator stops)."""
        stop_listening = self._environment.attendance.listen(self._on_attendance)
        try:
            await self._prepare()
            self._prepared.set()
            await self.quarantine_changed()
            self.post(rounds.Started())
            self.post(rounds.Joined(self._environment.attendance.clients))
            while self._machine.phase is not Phase.ENDED:
                event = await self._next_event()
                for action in self._machine.handle(event, now()):
                    await self._carry_out(action)
        except PotluckError as error:
            await self._end(rounds.End(rounds.Ending.FAILED, error.message))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._log.exception("run failed unexpectedly")
            reason = f"unexpected {type(error).__name__}: {error}; the coordinator's log says more"
            await self._end(rounds.End(rounds.Ending.FAILED, reason))
        finally:
            self._prepared.set()
            stop_listening()
            if self._slow is not None:
                self._slow.cancel()
            self.news.close()

    async def quarantine_changed(self) -> None:
        """Clients were put into quarantine or readmitted."""
        rows = await self._environment.in_store(lambda store: store.quarantined())
        self._gate.quarantined = frozenset(row.client_id for row in rows)
        self.post(rounds.Barred(self._gate.barred))

    async def _next_event(self) -> rounds.Event:
        with contextlib.suppress(asyncio.QueueEmpty):
            return self._events.get_nowait()  # what happened goes before what is due
        wakeup = self._machine.next_wakeup()
        timeout = None if wakeup is None else max(0.0, wakeup - now())
        try:
            return await asyncio.wait_for(self._events.get(), timeout)
        except TimeoutError:
            return rounds.Ticked()

    def _on_attendance(self, clients: tuple[str, ...], joined: bool) -> None:
        self.post(rounds.Joined(clients) if joined else rounds.Left(clients))

    async def _carry_out(self, action: rounds.Action) -> None:
        match action:
            case rounds.Admit(clients):
                await self._admit(clients)
            case rounds.Select():
                self._begin_slow(self._select(action))
            case rounds.Train(client):
                self._train(client)
            case rounds.Abandon():
                run_id = self.row.run_id
                ids = [
                    train_instruction_id(run_id, action.round, action.attempt, client)
                    for client in action.clients
                ]
                self._environment.attendance.retire(ids, abandon=True)
            case rounds.MarkMember():
                await self._mark(action)
            case rounds.GiveUpAttempt():
                await self._give_up(action)
            case rounds.Reduce(clients):
                self._begin_slow(self._reduce(clients))
            case rounds.Evaluate():
                self._begin_slow(self._evaluate())
            case rounds.Commit():
                self._begin_slow(self._commit(action))
            case rounds.Say(text, warning):
                self._say(text, warning=warning)
            case rounds.End():
                await self._end(action)

    def _begin_slow(self, work: Any) -> None:
        async def guarded() -> None:
            try:
                await work
            except PotluckError as error:
                self.post(rounds.Broke(error.message))
            except OSError as error:
                where = error.filename or "the state directory"
                self.post(rounds.Broke(f"can't use {where}: {error.strerror}; see its disk"))
            except Exception as error:
                self._log.exception("round failed unexpectedly")
                self.post(rounds.Broke(f"unexpected {type(error).__name__}: {error}"))

        self._slow = asyncio.create_task(guarded())

    # Preparing --------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        run_id = self.row.run_id
        in_store = self._environment.in_store
        self._roster = list(await in_store(lambda store: store.roster(run_id)))
        self._row_of = {client: row for row, client in enumerate(self._roster)}
        last: RoundRow | None = await in_store(lambda store: store.last_round(run_id))
        if self.row.model_sha256 is not None:
            self._model = await asyncio.to_thread(self.work.load, self.row.model_sha256)
        elif not await self._begin_with_a_model():
            self.post(rounds.StopRequested())
            return
        if self._profiling.needs_model:
            await self._find_profile_model()
        await self._gate.admit(self._roster)
        if last is None:
            self._states = await asyncio.to_thread(self._initial_states)
        else:
            self._states = await asyncio.to_thread(
                self.work.read_states,
                last.state_sha256,
                last.selector_scalars,
                last.strategy_scalars,
            )
        if self._roster:
            await self._resume(0 if last is None else last.key.round)

    async def _begin_with_a_model(self) -> bool:
        """Make the model before round 1; False where the operator stops that."""
        run_id = self.row.run_id
        initial = await asyncio.to_thread(self.work.initial_model)
        sha256: str | None = initial.sha256
        if (
            self._profiling.needs_model
            and self.blueprint.run_file.profiles.triplet.pretraining_rounds
        ):
            self._say("pre-training a model for triplets")
            sha256 = await self._environment.pretrain(initial.sha256)
        if sha256 is None:
            return False
        self._model = await asyncio.to_thread(self.work.load, sha256)
        await self._environment.in_store(
            lambda store: store.set_initial_model(run_id, sha256, utc())
        )
        return True

    async def _find_profile_model(self) -> None:
        """Triplets of late joiners too are estimated with the model before round 1."""
        run_id = self.row.run_id
        references = await self._environment.in_store(lambda store: store.model_references(run_id))
        [sha256] = [each.model_sha256 for each in references if each.round == 0]
        try:
            model = await asyncio.to_thread(self._environment.files.published, sha256)
        except NotFoundError:  # who has disclosed is known by it, but nobody can any more
            model = Published(sha256=sha256, size=0, renditions=())
        self._profiling.use_model(model)

    def _initial_states(self) -> States:
        assert self._model is not None  # noqa: S101  # _prepare has just loaded it
        with self._environment.files.open(self._model.sha256) as file:
            strategy = self.blueprint.strategy.init(file.arrays)
        return States(selector=self.blueprint.selector.init(self._population()), strategy=strategy)

    async def _resume(self, committed: int) -> None:
        """Go on where a coordinator went down."""
        run_id, in_store = self.row.run_id, self._environment.in_store
        history: list[RoundRow] = await in_store(lambda store: store.rounds(run_id))
        for row in history:
            self._gate.count_picks([member.client_id for member in row.members])
            for member in row.members:
                if member.update is not None:
                    self._samples[member.client_id] = member.update.samples
        attempt: Attempt | None = await in_store(lambda store: store.current_attempt(run_id))
        if attempt is None:
            last = await in_store(lambda store: store.last_attempt(run_id, committed + 1))
            await asyncio.to_thread(self.spool.remove)
            resumption = Resumption(
                roster=tuple(self._roster), committed=committed, attempt=last + 1, spent=last
            )
        else:
            resumption = await self._resume_attempt(attempt, committed)
        self._machine = RoundMachine(self.blueprint.plan, resumption)
        self._say(f"resumed after round {committed}")

    async def _resume_attempt(self, attempt: Attempt, committed: int) -> Resumption:
        key = attempt.key
        self._begun_attempt = key
        facts = self._facts
        facts.available = tuple(self._roster[row] for row in attempt.available)
        facts.cohort = tuple(member.client_id for member in attempt.members)
        cohort: list[tuple[str, MemberState]] = []
        for member in attempt.members:
            facts.hosts[member.client_id] = member.host_id
            facts.reasons[member.client_id] = member.reason
            state = member.state
            if state is MemberState.RECEIVED and member.update is not None:
                path = self.spool.path(
                    key.round, key.attempt, member.client_id, member.update.sha256
                )
                update = SpooledUpdate(client=member.client_id, path=path, row=member.update)
                if await asyncio.to_thread(spooled_intact, update):
                    facts.updates[member.client_id] = update
                else:
                    state = MemberState.SELECTED  # torn by the crash; have it sent again
            cohort.append((member.client_id, state))
        await asyncio.to_thread(self.spool.clear_except, key.round, key.attempt)
        return Resumption(
            roster=tuple(self._roster),
            committed=committed,
            attempt=key.attempt,
            available=facts.available,
            cohort=tuple(cohort),
        )

    # Selecting --------------------------------------------------------------------------------

    async def _admit(self, clients: tuple[str, ...]) -> None:
        run_id = self.row.run_id
        first = not self._roster
        await self._environment.in_store(lambda store: store.append_to_roster(run_id, clients))
        for client in clients:
            self._row_of[client] = len(self._roster)
            self._roster.append(client)
        await self._gate.admit(clients)
        if first:
            await self._set_state(RunState.RUNNING, "")
            self._states = States(
                selector=self.blueprint.selector.init(self._population()),
                strategy=self._states.strategy,
            )

    def _population(self) -> Population:
        return Population(
            ids=self._roster,
            classes=self.blueprint.task.classes,
            samples=np.array([self._samples.get(c, 0) for c in self._roster], dtype=np.int64),
            **self._gate.columns(),
        )

    async def _select(self, action: rounds.Select) -> None:
        if self._state is not RunState.RUNNING:
            await self._set_state(RunState.RUNNING, "")
        self._facts = _RoundFacts()  # nobody is selected while profiles are asked for
        rows = await self._gate.eligible(
            action.available,
            round_number=action.round,
            attempt=action.attempt,
            count=action.count,
            present=lambda client: self._machine.is_present(client, now()),
        )
        self.post(rounds.Barred(self._gate.barred))
        self._facts = _RoundFacts(available=tuple(self._roster[row] for row in rows.tolist()))
        key = AttemptKey(self.row.run_id, action.round, action.attempt)
        if self._begun_attempt != key:
            await self._environment.in_store(
                lambda store: store.begin_attempt(key, rows.tolist(), utc())
            )
            self._begun_attempt = key
        context = SelectionContext(
            round=action.round,
            seed=self.blueprint.run_file.seed,
            count=action.count,
            population=self._population(),
            available=rows,
        )
        selection = await asyncio.to_thread(self._choose, context)
        cohort = tuple(self._roster[int(row)] for row in selection.rows)
        facts = self._facts
        facts.cohort = cohort
        facts.reasons = dict(zip(cohort, selection.reasons, strict=True))
        for client in cohort:
            session = self._environment.attendance.session_of(client)
            facts.hosts[client] = session.host_id if session else ""
        stored = [(client, facts.hosts[client], facts.reasons[client]) for client in cohort]
        await self._environment.in_store(lambda store: store.set_cohort(key, stored))
        self._log.info("selected", round=action.round, attempt=action.attempt, cohort=cohort)
        self.post(rounds.Selected(cohort))

    def _choose(self, context: SelectionContext) -> Selection:
        name = self.blueprint.run_file.selector.name
        selection = self.blueprint.selector.select(self._states.selector, context)
        if not isinstance(selection, Selection):
            raise RunError(f"selector '{name}' asks questions, which this coordinator can't carry")
        check_selection(selection, context, name)
        return selection

    # Training ---------------------------------------------------------------------------------

    def _instruction_id(self, client: str) -> str:
        machine = self._machine
        return train_instruction_id(self.row.run_id, machine.round, machine.attempt, client)

    def _train(self, client: str) -> None:
        assert self._model is not None  # noqa: S101  # _prepare has loaded it
        machine, policy = self._machine, self.blueprint.run_file.round
        self._facts.told[client] = now()
        instruction = train_instruction(
            self.blueprint,
            self._instruction_id(client),
            self.row.run_id,
            machine.round,
            client,
            model_reference(self._model),
        )
        self._environment.attendance.instruct(
            instruction,
            deadline=now() + policy.deadline_seconds,
            on_answer=partial(self._on_answer, client, machine.round, machine.attempt),
        )

    def _on_answer(
        self, client: str, round_number: int, attempt: int, answer: coordinator_pb2.Answer
    ) -> None:
        machine = self._machine
        if (round_number, attempt) != (machine.round, machine.attempt):
            return
        if answer.WhichOneof("outcome") != "failure":
            return
        self.fail(client, f"{answer.failure.message} ({answer.failure.reason})")

    def fail(self, client: str, trouble: str) -> None:
        """A client can't deliver an update in the round under way."""
        self._environment.attendance.retire([self._instruction_id(client)])
        self.post(rounds.ClientFailed(client, trouble[:500]))

    async def _mark(self, action: rounds.MarkMember) -> None:
        key = AttemptKey(self.row.run_id, action.round, action.attempt)
        await self._environment.in_store(
            lambda store: store.set_member(key, action.client, action.state, trouble=action.trouble)
        )

    async def _give_up(self, action: rounds.GiveUpAttempt) -> None:
        key = AttemptKey(self.row.run_id, action.round, action.attempt)
        await self._environment.in_store(lambda store: store.abandon_attempt(key, action.reason))
        await asyncio.to_thread(self.spool.clear, action.round, action.attempt)

    # Finishing --------------------------------------------------------------------------------

    async def _reduce(self, clients: tuple[str, ...]) -> None:
        assert self._model is not None  # noqa: S101  # _prepare has loaded it
        updates = [self._facts.updates[client] for client in clients]
        self._facts.model, self._facts.strategy_state = await asyncio.to_thread(
            self.work.next_model,
            self._machine.round,
            updates,
            self._model,
            self._states.strategy,
        )
        self.post(rounds.Reduced())

    async def _evaluate(self) -> None:
        model = self._facts.model
        assert model is not None  # noqa: S101  # evaluation follows reduction
        counts = await asyncio.to_thread(self.work.evaluate, model)
        if counts is None:
            counts = await evaluate_on_clients(
                self._environment.attendance,
                self.blueprint,
                self._key,
                model,
                self._machine.available(now()),
                seconds=self.blueprint.run_file.round.deadline_seconds,
                present=lambda client: self._machine.is_present(client, now()),
            )
        self._facts.metrics = None if counts is None else counts.metrics()
        self.post(rounds.Evaluated())

    async def _commit(self, action: rounds.Commit) -> None:
        facts = self._facts
        assert facts.model is not None  # noqa: S101  # a commit follows a reduction
        assert facts.strategy_state is not None  # noqa: S101
        selector_state = self.blueprint.selector.observe(
            self._states.selector, self._outcome(action)
        )
        states = States(selector=selector_state, strategy=facts.strategy_state)
        state_sha256 = await asyncio.to_thread(self.work.write_states, states)
        metrics = facts.metrics
        commit = RoundCommit(
            key=self._key,
            model_sha256=facts.model.sha256,
            state_sha256=state_sha256,
            selector_scalars=states.selector.scalars,
            strategy_scalars=states.strategy.scalars,
            metrics=MetricsRow() if metrics is None else MetricsRow(**vars_of(metrics)),
            seconds=now() - facts.begun,
            bytes_down=facts.bytes_down,
            bytes_up=facts.bytes_up,
            committed_at=utc(),
            included=action.included,
        )
        await self._environment.in_store(lambda store: store.commit_round(commit))
        self._model, self._states = facts.model, states
        self._samples |= {c: facts.updates[c].row.samples for c in action.included}
        self._gate.count_picks(facts.cohort)
        self._tell_settled(action)
        await self._after_commit(action.round, action.attempt)
        self.post(rounds.Committed())

    def _outcome(self, action: rounds.Commit) -> RoundOutcome:
        facts = self._facts
        seconds = [
            facts.updates[c].row.seconds if c in facts.updates else np.nan for c in facts.cohort
        ]
        losses = [
            np.nan
            if c not in facts.updates or facts.updates[c].row.loss is None
            else facts.updates[c].row.loss
            for c in facts.cohort
        ]
        return RoundOutcome(
            round=action.round,
            selected=self._rows(facts.cohort),
            included=self._rows(action.included),
            seconds=np.array(seconds, dtype=np.float64),
            reports={"loss": np.array(losses, dtype=np.float64)},
        )

    def _rows(self, clients: Sequence[str]) -> Any:
        return np.array([self._row_of[client] for client in clients], dtype=np.int64)

    def _tell_settled(self, action: rounds.Commit) -> None:
        for client in self._facts.cohort:
            instruction = coordinator_pb2.Instruction(
                id=f"{self._instruction_id(client)}/settle",
                client_id=client,
                run_id=self.row.run_id,
                round=action.round,
                settle=coordinator_pb2.Settle(included=client in action.included),
            )
            self._environment.attendance.instruct(
                instruction, deadline=now() + 3600.0, until_acknowledged=True
            )

    async def _after_commit(self, round_number: int, attempt: int) -> None:
        await asyncio.to_thread(self.spool.clear, round_number, attempt)
        await self._environment.tidy()
        run_id = self.row.run_id
        row: RoundRow = await self._environment.in_store(lambda store: store.last_round(run_id))
        self.row = await self._environment.in_store(lambda store: store.run(run_id))
        self._log.info("committed", round=round_number, seconds=round(row.seconds, 3))
        self.news.publish(operator_pb2.WatchRunResponse(committed=committed_round_message(row)))
        self.news.publish(operator_pb2.WatchRunResponse(status=self.status()))

    async def _set_state(self, state: RunState, reason: str) -> None:
        run_id = self.row.run_id
        self._state = state
        await self._environment.in_store(
            lambda store: store.set_run_state(run_id, state, reason, utc())
        )
        self.row = await self._environment.in_store(lambda store: store.run(run_id))
        self.news.publish(operator_pb2.WatchRunResponse(status=self.status()))

    def _say(self, text: str, *, warning: bool = False) -> None:
        (self._log.warning if warning else self._log.info)(text)
        self.news.say(text, utc(), warning=warning)

    async def _end(self, action: rounds.End) -> None:
        state = {
            rounds.Ending.FINISHED: RunState.FINISHED,
            rounds.Ending.STOPPED: RunState.STOPPED,
            rounds.Ending.FAILED: RunState.FAILED,
        }[action.ending]
        if self._slow is not None:
            self._slow.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._slow
        run_id = self.row.run_id
        await asyncio.to_thread(self.spool.remove)  # first: where the disk is full, it makes room
        attempt = await self._environment.in_store(lambda store: store.current_attempt(run_id))
        if attempt is not None:
            reason = action.reason or "the run ended"
            await self._environment.in_store(
                lambda store: store.abandon_attempt(attempt.key, reason)
            )
        self._log.info("run ended", state=state.value, reason=action.reason)
        await self._set_state(state, action.reason)


def check_selection(selection: Selection, context: SelectionContext, name: str) -> None:
    """Raises RunError, naming the selector, unless it chose available clients, none twice."""
    rows = [int(row) for row in selection.rows]
    if not rows:
        raise RunError(f"selector '{name}' chose nobody in round {context.round}", selector=name)
    if len(set(rows)) != len(rows):
        raise RunError(f"selector '{name}' chose a client twice", selector=name)
    strangers = sorted(set(rows) - set(context.available.tolist()))
    if strangers:
        raise RunError(
            f"selector '{name}' chose row {strangers[0]}, which is not available", selector=name
        )
    if len(rows) > context.count:
        raise RunError(
            f"selector '{name}' chose {len(rows)} clients; the run asks for {context.count}",
            selector=name,
        )
    if len(selection.reasons) != len(rows):
        raise RunError(f"selector '{name}' must give one reason for each client", selector=name)
    if selection.quotas is not None:
        raise RunError(
            f"selector '{name}' limits how many samples clients train on, which running "
            "federations can't do; unset the option that asks for it (of kl: truncate)",
            selector=name,
        )


def vars_of(metrics: Metrics) -> Mapping[str, float | None]:
    """A model's metrics by name."""
    return {
        "loss": metrics.loss,
        "accuracy": metrics.accuracy,
        "worst_group_accuracy": metrics.worst_group_accuracy,
        "weighted_f1": metrics.weighted_f1,
    }
