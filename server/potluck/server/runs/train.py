"""A round's training: clients are told to train, and what they send or why they can't is kept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from potluck.common.errors import is_permanent
from potluck.common.plain_text import plain
from potluck.common.training_agreement import training_sha256
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.aggregation.update_files import SpooledUpdate
from potluck.server.clock import now
from potluck.server.hosts.instructions import (
    model_reference,
    train_instruction,
    train_instruction_id,
)
from potluck.server.rounds import events as rounds
from potluck.server.runs.auxiliaries import AuxiliaryFiles
from potluck.server.runs.masked_rounds import MaskedRounds
from potluck.server.runs.run import Run
from potluck.server.store.records import AttemptKey, MemberChange, MemberState


@dataclass(frozen=True)
class _Arrival:
    """An update that is to be recorded."""

    key: AttemptKey
    change: MemberChange
    recorded: asyncio.Future[None]


class Collecting:
    """The part of a run that collects updates."""

    def __init__(self, run: Run, masking: MaskedRounds | None = None) -> None:
        self._run = run
        self._masking = masking
        self.auxiliaries = AuxiliaryFiles(run)
        self._in_store = run.services.in_store
        self._arrivals: list[_Arrival] = []
        self._recording: asyncio.Task[None] | None = None

    # Instructions -----------------------------------------------------------------------------

    async def train(self, client: str) -> None:
        """Tell a client to train."""
        run = self._run
        auxiliary = await self.auxiliaries.message(client)
        machine, policy = run.machine, run.plan.run_file.round
        run.intake.instructed[client] = now()
        instruction = train_instruction(
            run.plan,
            run.instruction_id(client),
            run.row.run_id,
            machine.round,
            client,
            model_reference(run.model),
            auxiliary,
            quotas=run.attempt.cohort[client].quotas,
        )
        if self._masking is not None:
            await self._masking.begin(training_sha256(instruction.train))
        run.services.attendance.instruct(
            instruction,
            deadline=now() + policy.deadline_seconds,
            on_answer=partial(self._on_answer, client, machine.round, machine.attempt),
        )

    def abandon(self, action: rounds.Abandon) -> None:
        """Tell clients to stop."""
        run_id = self._run.row.run_id
        ids = [
            train_instruction_id(run_id, action.round, action.attempt, client)
            for client in action.clients
        ]
        self._run.services.attendance.retire(ids, abandon=True)

    def _on_answer(
        self, client: str, round_number: int, attempt: int, answer: coordinator_pb2.Answer
    ) -> None:
        machine = self._run.machine
        if (round_number, attempt) != (machine.round, machine.attempt):
            return
        if answer.WhichOneof("outcome") != "failure":
            return
        self.fail(client, answer.failure.message, answer.failure.reason)

    def fail(self, client: str, message: str, reason: str) -> None:
        """A client can't deliver an update in the round under way."""
        run = self._run
        run.services.attendance.retire([run.instruction_id(client)])
        run.services.observer.failed(reason)
        trouble = plain(f"{message[:400]} ({reason[:80]})", 500)
        if is_permanent(reason):
            run.left_out.add({client: trouble})
        run.post(rounds.ClientFailed(client, trouble))

    # Updates ----------------------------------------------------------------------------------

    def expects(self, client: str, update_id: str) -> bool:
        """Whether an update with this id is waited for."""
        run = self._run
        return client in run.machine.cohort.pending and update_id == run.instruction_id(client)

    def has(self, client: str, update_id: str) -> bool:
        """Whether the update with this id is spooled in the attempt under way."""
        run = self._run
        return client in run.intake.updates and update_id == run.instruction_id(client)

    async def accept(self, client: str, update_id: str, update: SpooledUpdate) -> None:
        """A verified update is in the spool: record it, then tell the machine."""
        run, key = self._run, self._run.key
        change = MemberChange(client_id=client, state=MemberState.RECEIVED, update=update.row)
        await self._record(key, change)
        if not self.expects(client, update_id):
            return
        run.intake.updates[client] = update
        run.services.attendance.retire([update_id])
        run.post(rounds.UpdateArrived(client, update.row.seconds))

    async def _record(self, key: AttemptKey, change: MemberChange) -> None:
        """Store that an update arrived, with those that arrive while others are being stored."""
        arrival = _Arrival(key, change, asyncio.get_running_loop().create_future())
        self._arrivals.append(arrival)
        if self._recording is None or self._recording.done():
            self._recording = asyncio.create_task(self._record_arrivals())
        await arrival.recorded

    async def recorded(self) -> None:
        """Wait until the updates that have arrived by now are stored, and the machine told."""
        if self._recording is not None:
            await asyncio.wait({self._recording})

    async def _record_arrivals(self) -> None:
        while self._arrivals:
            batch, self._arrivals = self._arrivals, []
            if len({arrival.key for arrival in batch}) > 1 or not await self._try_record(batch):
                for arrival in batch:  # so that each learns what is wrong with its own
                    await self._try_record([arrival], last=True)

    async def _try_record(self, batch: list[_Arrival], *, last: bool = False) -> bool:
        key, changes = batch[0].key, [arrival.change for arrival in batch]
        try:
            await self._in_store(lambda store: store.set_members(key, changes))
        except Exception as error:
            if last or len(batch) == 1:
                _resolve(batch[0], error)
            return last or len(batch) == 1
        for arrival in batch:
            _resolve(arrival, None)
        return True

    # How a client's part ended ----------------------------------------------------------------

    async def mark(self, action: rounds.MarkMember) -> None:
        """Record how a client's part in an attempt ended."""
        key = AttemptKey(self._run.row.run_id, action.round, action.attempt)
        if self._masking is not None:
            self._masking.lose(action.client)
        await self.recorded()  # an update that came just before must not be stored on top of this
        await self._in_store(
            lambda store: store.set_member(key, action.client, action.state, trouble=action.trouble)
        )

    async def give_up(self, action: rounds.GiveUpAttempt) -> None:
        """Drop what an attempt spooled."""
        key = AttemptKey(self._run.row.run_id, action.round, action.attempt)
        if self._masking is not None:
            await self._masking.give_up()
        await self._in_store(lambda store: store.abandon_attempt(key, action.reason))
        if self._run.intake.updates:
            await self._run.judge_offenders()
        await asyncio.to_thread(self._run.spool.clear, action.round, action.attempt)


def _resolve(arrival: _Arrival, error: Exception | None) -> None:
    if arrival.recorded.done():
        return  # the call that waited for it was cancelled
    if error is None:
        arrival.recorded.set_result(None)
    else:
        arrival.recorded.set_exception(error)
