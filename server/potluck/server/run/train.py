"""A round's training: instructs clients to start and to stop, and records each member's state."""

from __future__ import annotations

import asyncio
from functools import partial

from potluck.common.errors import ProtocolError
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.clock import now
from potluck.server.hosts.instructions import (
    model_reference,
    question_before_upload,
    train_instruction,
    train_instruction_id,
)
from potluck.server.live.models import AuxiliaryFiles
from potluck.server.live.run import Run
from potluck.server.machine import events as rounds
from potluck.server.select.selection_record import SelectionRecord
from potluck.server.select.upload_decision import read_offer
from potluck.server.store.records import AttemptKey, LateRow
from potluck.server.updates.update_inbox import UpdateInbox
from potluck.server.updates.update_path import UpdatePath


class Training:
    """Starts and stops the training of an attempt's cohort. Used on the event loop."""

    def __init__(
        self, run: Run, path: UpdatePath, inbox: UpdateInbox, record: SelectionRecord
    ) -> None:
        self._run = run
        self._path = path
        self._inbox = inbox
        self._record = record
        self.auxiliaries = AuxiliaryFiles(run.plan.strategy, run.models, run.services.files)

    async def begin(self, client: str) -> None:
        """Instruct a client to train."""
        run = self._run
        auxiliary = await self.auxiliaries.message(client, run.machine.round)
        machine, work = run.machine, run.attempt.cohort[client].work
        await run.updates.give_up(client)
        run.updates.note_instructed(client, now())
        instruction = train_instruction(
            run.plan,
            run.instruction_id(client),
            run.id,
            machine.round,
            client,
            model_reference(run.models.current),
            auxiliary,
            member=work,
            # A client with its own number of passes is trained alone, not in batched steps with
            # others.
            companions=[] if work.epochs is not None else run.companions_of(client),
            speed=run.speed(client),
        )
        instruction.train.MergeFrom(coordinator_pb2.Train(kept=run.kept_state(client)))
        state = await run.models.enrolled(len(run.roster), run.selecting.population)
        part = run.plan.strategy.part(state, client)
        if part is not None:
            instruction.train.part = part
        asked = run.plan.before_upload
        if asked is not None and machine.cohort.undecided:
            instruction.train.before_upload.CopyFrom(question_before_upload(asked, instruction))
        if run.services.spans is not None:
            instruction.trace_parent = run.services.spans.context_of(client)
        await self._record.prove(instruction.train, run.key)
        await self._path.begin(instruction.train)
        run.services.attendance.instruct(
            instruction,
            deadline=now() + self._seconds(),
            on_answer=partial(self._on_answer, client, machine.round, machine.attempt),
        )

    async def begin_late(self, row: LateRow) -> None:
        """Instruct a client to continue a training that missed its round.

        Does nothing if the instruction is already pending.
        """
        run, client = self._run, row.client_id
        instruction = train_instruction(
            run.plan,
            train_instruction_id(*row.key, client),
            run.id,
            row.round,
            client,
            model_reference(run.models.whole(row.model_blake3)),
            member=row.work,
        )
        instruction.train.MergeFrom(coordinator_pb2.Train(kept=run.kept_state(client)))
        await self._record.prove(instruction.train, row.key)
        run.updates.note_instructed_late(client, now())
        run.services.attendance.instruct(
            instruction,
            deadline=now() + self._seconds(),
            on_answer=partial(self._on_answer, client, row.round, row.attempt),
        )

    def _seconds(self) -> float:
        """Return the maximum duration of a training in seconds.

        A training that misses its round may continue for as many more rounds as updates may be
        late.
        """
        late = self._run.updates.late
        more = 0 if late.simulated else late.most_rounds
        return self._run.plan.run_file.round.deadline_seconds * (1 + more)

    def _on_answer(
        self, client: str, round_number: int, attempt: int, answer: coordinator_pb2.Answer
    ) -> None:
        machine, late = self._run.machine, self._run.updates.late.find(client)
        under_way = (round_number, attempt) == (machine.round, machine.attempt)
        if late is not None and (round_number, attempt) == (late.round, late.attempt):
            if answer.WhichOneof("outcome") == "failure":
                failure = answer.failure
                self._inbox.fail_late(client, f"{failure.message[:400]} ({failure.reason[:80]})")
            return
        if not under_way:
            return
        match answer.WhichOneof("outcome"):
            case "failure":
                self._inbox.fail(client, answer.failure.message, answer.failure.reason)
            case "offer" if machine.cohort.undecided and machine.cohort.waits_for(client):
                self._take_offer(client, answer)
            case _:
                pass

    def _take_offer(self, client: str, answer: coordinator_pb2.Answer) -> None:
        try:
            self._run.updates.offers[client] = read_offer(self._run.plan, answer)
        except ProtocolError as error:
            self._inbox.fail(client, error.message, error.reason)
            return
        self._run.services.attendance.retire([answer.instruction_id])
        self._run.post(rounds.UpdateReady(client))

    def abandon(self, action: rounds.Abandon) -> None:
        """Instruct clients to stop training."""
        ids = [
            train_instruction_id(self._run.id, action.round, action.attempt, client)
            for client in action.clients
        ]
        self._run.services.attendance.retire(ids, abandon=True)

    async def mark(self, action: rounds.MarkMember) -> None:
        """Record in the store how a client's training in an attempt ended."""
        key = AttemptKey(self._run.id, action.round, action.attempt)
        self._path.lose(action.client)
        # An update that arrived just before is stored first, so it can't overwrite this state.
        await self._inbox.recorded()
        await self._run.services.in_store(
            lambda store: store.set_member(key, action.client, action.state, trouble=action.trouble)
        )

    async def give_up(self, action: rounds.GiveUpAttempt) -> None:
        """Delete the spooled updates of an attempt that has been given up."""
        run, key = self._run, AttemptKey(self._run.id, action.round, action.attempt)
        await self._path.give_up()
        await run.services.in_store(
            lambda store: store.abandon_attempt(key, action.reason, action.state)
        )
        if run.updates.received:
            await run.updates.judge_offenders()
        await asyncio.to_thread(run.updates.spool.clear, action.round, action.attempt)
