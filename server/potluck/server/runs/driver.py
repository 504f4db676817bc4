"""One run under way: feeds the state machine what happens and carries out what it answers.

Lives on the event loop. Blocking work goes to threads: the store's calls to its one thread, the
heavy part of a round (`aggregation/model_work.py`) to any. What the coordinator acts on is stored
first.

The parts of a run share its `Run`: `resume.py` brings it to where the store says it is,
`select.py` chooses cohorts, `train.py` has them train, `commit.py` commits.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from potluck.common.errors import PotluckError, StorageError, disk_error
from potluck.common.metrics.metric_labels import MASKED
from potluck.rpc.v1 import operator_pb2
from potluck.server.aggregation.model_files import ModelVersion
from potluck.server.aggregation.model_work import ModelWork
from potluck.server.aggregation.spool import Spool
from potluck.server.aggregation.update_files import SpooledUpdate
from potluck.server.hosts.offences import OFFENCES
from potluck.server.rounds import events as rounds
from potluck.server.rounds.machine import Phase
from potluck.server.rounds.plan import RunPlan
from potluck.server.runs.commit import Finishing
from potluck.server.runs.feed import RunFeed, member_message
from potluck.server.runs.masked_rounds import MaskedRounds
from potluck.server.runs.resume import Preparing
from potluck.server.runs.run import Run
from potluck.server.runs.select import Selecting
from potluck.server.runs.services import RunServices, now
from potluck.server.runs.train import Collecting
from potluck.server.store.records import MemberState, RunRow, RunState

_STATE_AFTER = {
    rounds.RunEnding.FINISHED: RunState.FINISHED,
    rounds.RunEnding.STOPPED: RunState.STOPPED,
    rounds.RunEnding.FAILED: RunState.FAILED,
}


class RunDriver:
    """One run under way."""

    def __init__(
        self,
        row: RunRow,
        plan: RunPlan,
        work: ModelWork,
        spool: Spool,
        services: RunServices,
    ) -> None:
        self.plan = plan
        self.spool = spool
        self.work = work
        self._services = services
        self._run = Run(row, plan, work, spool, services)
        self._preparing = Preparing(self._run)
        self._selecting = Selecting(self._run)
        masked = plan.run_file.secure_aggregation
        self.masking = MaskedRounds(self._run) if masked else None
        """The secure sums of its rounds, where updates are masked."""
        self._collecting = Collecting(self._run, self.masking)
        self._finishing = Finishing(self._run, self.masking)
        self._prepared = asyncio.Event()
        self._slow: asyncio.Task[None] | None = None
        self._over = False

    # What others see --------------------------------------------------------------------------

    @property
    def row(self) -> RunRow:
        """The run as it is in the store."""
        return self._run.row

    def status(self) -> operator_pb2.RunStatus:
        """Where the run stands, and what it waits for."""
        return self._run.status()

    def waiting(self) -> operator_pb2.Waiting | None:
        """What the run waits for; None while a round is under way."""
        return self._run.waiting()

    @property
    def feed(self) -> RunFeed:
        """What happens, for those who watch."""
        return self._run.feed

    @property
    def model(self) -> ModelVersion | None:
        """The model clients train from."""
        return self._run.model

    def why_left_out(self, client: str) -> str:
        """Why a client can't take part in the run; nothing where it can."""
        row = self._run.left_out.get(client)
        return "" if row is None else row.trouble

    def progress(self) -> operator_pb2.RoundProgress | None:
        """The round under way, for people."""
        machine, facts = self._run.machine, self._run.facts
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
        facts, member = self._run.facts, self._run.machine.members.get(client)
        pending = self._services.attendance.pending(self._run.instruction_id(client))
        return member_message(
            client,
            facts.hosts.get(client, ""),
            facts.reasons.get(client, ""),
            member.state if member else MemberState.SELECTED,
            member.trouble if member else "",
            facts.updates.get(client),
            pending.progress if pending else None,
        )

    # Files and updates ------------------------------------------------------------------------

    async def prepared(self) -> None:
        """Wait until it is known where the run stands; what is expected is not known before."""
        await self._prepared.wait()

    def expects(self, client: str, update_id: str) -> bool:
        """Whether an update with this id is waited for."""
        return self._collecting.expects(client, update_id)

    def has(self, client: str, update_id: str) -> bool:
        """Whether the update with this id is spooled in the attempt under way."""
        return self._collecting.has(client, update_id)

    async def accept(self, client: str, update_id: str, update: SpooledUpdate) -> None:
        """A verified update is in the spool: record it, then tell the machine."""
        await self._collecting.accept(client, update_id, update)

    def fail(self, client: str, message: str, reason: str) -> None:
        """The update of a client, who is in the round under way, can't be used."""
        if reason in OFFENCES:
            self._run.offenders.add(client)
        self._collecting.fail(client, message, reason)

    def spool_path(self, client: str, blake3: str) -> Path:
        """Where the client's update of this attempt belongs."""
        machine = self._run.machine
        return self.spool.path(machine.round, machine.attempt, client, blake3)

    def serves(self, blake3: str) -> bool:
        """Whether hosts fetch this file for this run."""
        of_model = self.model is not None and blake3 in self.model.digests
        return of_model or blake3 in self._collecting.auxiliaries.digests

    def files_in_use(self) -> set[str]:
        """Files that must not be deleted now; of a run that is over, retention keeps some."""
        run = self._run
        if self._over:
            return set()
        of_models = {
            digest
            for model in (run.model, run.model_before, run.facts.model, run.profiling.model)
            if model is not None
            for digest in model.digests
        }
        return of_models | self._collecting.auxiliaries.digests

    def count_down(self, blake3: str, sent: int) -> None:
        """Bytes of a file that belongs to the model went out."""
        self._run.facts.bytes_down += sent
        if self.model is not None:
            self._services.observer.sent(self.model.encoding_of(blake3), sent)

    def upload_begins(self) -> None:
        """An update begins to arrive."""
        self._services.observer.upload_begins()

    def count_up(self, received: int) -> None:
        """Update bytes came in."""
        self._run.facts.bytes_up += received
        up = self.plan.run_file.transport.up
        encoding = up.encoding if self.masking is None else MASKED
        self._services.observer.received(encoding, received)

    def seconds_since_told(self, client: str) -> float:
        """Seconds since the client was told to train."""
        return now() - self._run.facts.told.get(client, now())

    # Driving ----------------------------------------------------------------------------------

    def post(self, event: rounds.Event) -> None:
        """Something happened."""
        self._run.post(event)

    async def drive(self) -> None:
        """Go on until the run ends, or the task is cancelled (the coordinator stops)."""
        run = self._run
        stop_listening = self._services.attendance.listen(self._on_attendance)
        try:
            await self._preparing.prepare()
            self._prepared.set()
            await self.quarantine_changed()
            run.post(rounds.Started())
            self._on_attendance(self._services.attendance.clients, joined=True)
            while run.machine.phase is not Phase.ENDED:
                event = await self._next_event()
                actions = run.machine.handle(event, now())
                self._services.observer.noted(event, actions, run.machine.phase)
                for action in actions:
                    await self._carry_out(action)
        except PotluckError as error:
            await self._break(self._reason(error))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            run.log.exception("run failed unexpectedly")
            reason = f"unexpected {type(error).__name__}: {error}; the coordinator's log says more"
            await self._break(reason)
        finally:
            self._prepared.set()
            stop_listening()
            if self._slow is not None:
                self._slow.cancel()
            self._finishing.stop()
            if self.masking is not None:
                self.masking.stop()
            run.feed.close()

    async def quarantine_changed(self) -> None:
        """Clients were put into quarantine or readmitted."""
        rows = await self._services.in_store(lambda store: store.quarantined())
        eligibility = self._run.eligibility
        eligibility.quarantined = frozenset(row.client_id for row in rows)
        self.post(rounds.Excluded(eligibility.excluded))

    async def _next_event(self) -> rounds.Event:
        run = self._run
        with contextlib.suppress(asyncio.QueueEmpty):
            return run.events.get_nowait()  # what happened goes before what is due
        wakeup = run.machine.next_wakeup()
        timeout = None if wakeup is None else max(0.0, wakeup - now())
        try:
            async with asyncio.timeout(timeout):
                return await run.events.get()
        except TimeoutError:
            pass
        # What came in time is in time, also where the database was away and it is stored late.
        await self._collecting.recorded()
        with contextlib.suppress(asyncio.QueueEmpty):
            return run.events.get_nowait()
        return rounds.Ticked()

    def _on_attendance(self, clients: tuple[str, ...], joined: bool) -> None:
        if not joined:
            self.post(rounds.Left(clients))
            return
        self._run.welcome(clients)
        sessions = {client: self._services.attendance.session_of(client) for client in clients}
        hosts = {client: session.host_id for client, session in sessions.items() if session}
        self.post(rounds.Joined(clients, hosts))

    async def _carry_out(self, action: rounds.Action) -> None:
        match action:
            case rounds.Admit(clients):
                await self._selecting.admit(clients)
            case rounds.LeaveOut(clients):
                await self._run.record_left_out(clients)
            case rounds.Readmit(clients):
                await self._run.record_readmitted(clients)
            case rounds.Select():
                self._begin_slow(self._selecting.select(action))
            case rounds.Train(client):
                await self._collecting.train(client)
            case rounds.Abandon():
                self._collecting.abandon(action)
            case rounds.MarkMember():
                await self._collecting.mark(action)
            case rounds.GiveUpAttempt():
                await self._collecting.give_up(action)
            case rounds.Reduce(clients):
                self._begin_slow(self._finishing.reduce(clients))
            case rounds.Evaluate():
                self._begin_slow(self._finishing.evaluate())
            case rounds.Commit():
                self._begin_slow(self._finishing.commit(action))
            case rounds.Say(text, warning):
                self._run.say(text, warning=warning)
            case rounds.End():
                await self._end(action)

    def _begin_slow(self, work: Any) -> None:
        async def guarded() -> None:
            try:
                await work
            except PotluckError as error:
                self.post(rounds.Broke(self._reason(error)))
            except OSError as error:
                self.post(rounds.Broke(self._reason(disk_error(error, "the state directory"))))
            except Exception as error:
                self._run.log.exception("round failed unexpectedly")
                self.post(rounds.Broke(f"unexpected {type(error).__name__}: {error}"))

        self._slow = asyncio.create_task(guarded())

    def _reason(self, error: PotluckError) -> str:
        """Why the run fails; for a disk or a database, also how it goes on once that is mended."""
        if not isinstance(error, StorageError):
            return error.message
        return f"{error.message}; then `potluck resume {self.row.run_id}`"

    async def _break(self, reason: str) -> None:
        """End the run for something that the machine has not heard of."""
        actions = self._run.machine.handle(rounds.Broke(reason), now())
        for action in actions or [rounds.End(rounds.RunEnding.FAILED, reason)]:
            await self._carry_out(action)

    async def _end(self, action: rounds.End) -> None:
        state = _STATE_AFTER[action.ending]
        if self._slow is not None:
            self._slow.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._slow
        if self.masking is not None:
            await self.masking.give_up()
        try:
            await self._finishing.settled()
            self._services.files.let_go(self.files_in_use())
            self._over = True
            await self._services.tidy(self.row.committed_rounds)  # a kill may have kept it
        except (PotluckError, OSError) as error:
            self._run.say(f"the last round's files were not tidied up: {error}", warning=True)
        run_id, in_store = self.row.run_id, self._services.in_store
        try:  # first: where the disk is full, it makes room
            await asyncio.to_thread(self.spool.remove)
        except (PotluckError, OSError) as error:
            self._run.say(f"the run's spool was not removed: {error}", warning=True)
        attempt = await in_store(lambda store: store.current_attempt(run_id))
        if attempt is not None:
            reason = action.reason or "the run ended"
            await in_store(lambda store: store.abandon_attempt(attempt.key, reason))
        self._run.log.info("run ended", state=state.value, reason=action.reason)
        await self._run.set_state(state, action.reason)
        self._services.observer.ended(action.ending)
