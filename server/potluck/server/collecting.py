"""A round's training: clients are told to train, and what they send or why they can't is kept."""

from __future__ import annotations

import asyncio
from functools import partial

from potluck.rpc.v1 import coordinator_pb2
from potluck.server import round_events as rounds
from potluck.server.auxiliaries import AuxiliaryFiles
from potluck.server.environment import now
from potluck.server.standing import Standing
from potluck.server.store.records import AttemptKey, MemberState
from potluck.server.update_files import SpooledUpdate
from potluck.server.wire import model_reference, train_instruction, train_instruction_id


class Collecting:
    """The part of a run that collects updates."""

    def __init__(self, run: Standing) -> None:
        self._run = run
        self.auxiliaries = AuxiliaryFiles(run)
        self._in_store = run.environment.in_store

    # Instructions -----------------------------------------------------------------------------

    async def train(self, client: str) -> None:
        """Tell a client to train."""
        run = self._run
        auxiliary = await self.auxiliaries.message(client)
        assert run.model is not None  # noqa: S101  # a run is prepared before anybody trains
        machine, policy = run.machine, run.blueprint.run_file.round
        run.facts.told[client] = now()
        instruction = train_instruction(
            run.blueprint,
            run.instruction_id(client),
            run.row.run_id,
            machine.round,
            client,
            model_reference(run.model),
            auxiliary,
        )
        run.environment.attendance.instruct(
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
        self._run.environment.attendance.retire(ids, abandon=True)

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
        run.environment.attendance.retire([run.instruction_id(client)])
        run.environment.observer.failed(reason)
        run.post(rounds.ClientFailed(client, f"{message} ({reason})"[:500]))

    # Updates ----------------------------------------------------------------------------------

    def expects(self, client: str, update_id: str) -> bool:
        """Whether an update with this id is waited for."""
        run = self._run
        return client in run.machine.pending and update_id == run.instruction_id(client)

    def has(self, client: str, update_id: str) -> bool:
        """Whether the update with this id is spooled in the attempt under way."""
        run = self._run
        return client in run.facts.updates and update_id == run.instruction_id(client)

    async def accept(self, client: str, update_id: str, update: SpooledUpdate) -> None:
        """A verified update is in the spool: record it, then tell the machine."""
        run, key = self._run, self._run.key
        await self._in_store(
            lambda store: store.set_member(key, client, MemberState.RECEIVED, update=update.row)
        )
        if not self.expects(client, update_id):
            return
        run.facts.updates[client] = update
        run.environment.attendance.retire([update_id])
        run.post(rounds.UpdateArrived(client))

    # How a client's part ended ----------------------------------------------------------------

    async def mark(self, action: rounds.MarkMember) -> None:
        """Record how a client's part in an attempt ended."""
        key = AttemptKey(self._run.row.run_id, action.round, action.attempt)
        await self._in_store(
            lambda store: store.set_member(key, action.client, action.state, trouble=action.trouble)
        )

    async def give_up(self, action: rounds.GiveUpAttempt) -> None:
        """Drop what an attempt spooled."""
        key = AttemptKey(self._run.row.run_id, action.round, action.attempt)
        await self._in_store(lambda store: store.abandon_attempt(key, action.reason))
        await asyncio.to_thread(self._run.spool.clear, action.round, action.attempt)
