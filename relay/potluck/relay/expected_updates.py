"""Updates that the coordinator has requested from the hosts behind a relay.

The relay reads them from the instructions that pass through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from potluck.common.real_time import seconds_of
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

GRACE_SECONDS = 3600.0
"""Seconds for which an update is held beyond its deadline.

A coordinator that was disconnected may still accept a late update.
"""


@dataclass(frozen=True, kw_only=True)
class ExpectedUpdate:
    """An update that a client was instructed to make. host: the host that received the instruction.
    summed: True if the update goes into a sum. expires: seconds since 1970."""

    update_id: str
    client_id: str
    run_id: str
    host: str
    summed: bool
    expires: float


class ExpectedUpdates:
    """The newest expected update of each client and run.

    There is at most one per pair of client and run, and no other limit. Runs on the event loop.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        drop: Callable[[str], None],
        settle: Callable[[str], None],
    ) -> None:
        """`clock`: seconds since 1970. `drop`: called with the id of each update that is no longer
        needed. `settle`: called with the id of each update whose round is over; the coordinator may
        have received it."""
        self._clock = clock
        self._drop = drop
        self._settled = settle
        self._newest: dict[tuple[str, str], ExpectedUpdate] = {}
        self._awaited: dict[str, ExpectedUpdate] = {}  # by update id: updates that a sum waits for
        self.changed = asyncio.Event()
        """Set when fewer updates are expected; the task that waits for this event clears it."""

    def see(self, instruction: rpc.Instruction, host: str) -> None:
        """Record an instruction that passes through to a host."""
        if instruction.HasField("train"):
            self._expect(instruction, host)
        elif instruction.HasField("settle"):
            self._settle(instruction)
        elif instruction.HasField("abandon"):
            abandoned = set(instruction.abandon.instruction_ids)
            for key, expected in list(self._newest.items()):
                if expected.update_id in abandoned:
                    del self._newest[key]
            for update_id in sorted(abandoned):
                self._drop(update_id)
            self.arrived(abandoned)

    def _expect(self, instruction: rpc.Instruction, host: str) -> None:
        expected = ExpectedUpdate(
            update_id=instruction.id,
            client_id=instruction.client_id,
            run_id=instruction.run_id,
            host=host,
            summed=instruction.train.encoding == transfer_pb2.ENCODING_SUM,
            expires=self._clock() + seconds_of(instruction.time_left) + GRACE_SECONDS,
        )
        key = (expected.client_id, expected.run_id)
        older = self._newest.get(key)
        self._newest[key] = expected
        if expected.summed:
            self._awaited[expected.update_id] = expected
        if older is not None and older.update_id != expected.update_id:
            self._drop(older.update_id)
            self.arrived([older.update_id])

    def _settle(self, instruction: rpc.Instruction) -> None:
        """Stop expecting a client's update whose round is over, even if the client still trains.

        Before its host learns this, it may begin to send the update. The relay must then ask the
        coordinator, which refuses the update.
        """
        update_id = instruction.settle.update_id
        if self.find(update_id, instruction.client_id, instruction.run_id) is not None:
            del self._newest[instruction.client_id, instruction.run_id]
        self.arrived([update_id])
        # Always settle: the training instruction may have passed before this process began.
        self._settled(update_id)

    def awaited(self, run_id: str) -> bool:
        """Return True if connected hosts still make updates for a run's sums."""
        return any(each.run_id == run_id for each in self._awaited.values())

    def arrived(self, update_ids: Iterable[str]) -> None:
        """Stop awaiting updates that have arrived or will never arrive."""
        for update_id in update_ids:
            self._awaited.pop(update_id, None)
        self.changed.set()

    def answered(self, update_id: str, host: str) -> None:
        """Stop awaiting an update, because its host has answered the instruction.

        Nothing happens if the instruction went to another host.
        """
        expected = self._awaited.get(update_id)
        if expected is not None and expected.host == host:
            self.arrived([update_id])

    def received(self, members: Iterable[transfer_pb2.SumMember]) -> None:
        """Stop awaiting the members of a host's sum that has arrived.

        A member has no effect if its update was requested from another client.
        """
        self.arrived(
            each.update_id
            for each in members
            if (expected := self._awaited.get(each.update_id)) is not None
            and expected.client_id == each.client_id
        )

    def left(self, host: str) -> None:
        """Stop awaiting the updates of a host that has disconnected."""
        self.arrived([key for key, each in self._awaited.items() if each.host == host])

    def find(self, update_id: str, client_id: str, run_id: str) -> ExpectedUpdate | None:
        """Return the expected update with this id, client and run; None if it is not the newest."""
        expected = self._newest.get((client_id, run_id))
        return expected if expected is not None and expected.update_id == update_id else None
