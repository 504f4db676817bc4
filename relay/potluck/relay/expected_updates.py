"""What the coordinator has asked the hosts behind a relay for, as its instructions go through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from potluck.rpc.v1 import coordinator_pb2 as rpc

GRACE_SECONDS = 3600.0
"""An update is held so long beyond its deadline: a coordinator that was away may still want it."""


@dataclass(frozen=True, kw_only=True)
class ExpectedUpdate:
    """An update that a client was told to make. expires: seconds since 1970."""

    update_id: str
    client_id: str
    run_id: str
    expires: float


class ExpectedUpdates:
    """The newest of each client and run, so that there is no end to them but their number.

    Lives on the event loop.
    """

    def __init__(self, clock: Callable[[], float], drop: Callable[[str], None]) -> None:
        """`clock`: seconds since 1970. `drop` is called with the id of each update that is no
        longer waited for."""
        self._clock = clock
        self._drop = drop
        self._newest: dict[tuple[str, str], ExpectedUpdate] = {}

    def see(self, instruction: rpc.Instruction) -> None:
        """An instruction goes through to a host."""
        if instruction.HasField("train"):
            self._expect(instruction)
        elif instruction.HasField("abandon"):
            abandoned = set(instruction.abandon.instruction_ids)
            for key, expected in list(self._newest.items()):
                if expected.update_id in abandoned:
                    del self._newest[key]
            for update_id in abandoned:
                self._drop(update_id)

    def _expect(self, instruction: rpc.Instruction) -> None:
        left = instruction.time_left.ToTimedelta().total_seconds()
        expected = ExpectedUpdate(
            update_id=instruction.id,
            client_id=instruction.client_id,
            run_id=instruction.run_id,
            expires=self._clock() + left + GRACE_SECONDS,
        )
        key = (expected.client_id, expected.run_id)
        older = self._newest.get(key)
        self._newest[key] = expected
        if older is not None and older.update_id != expected.update_id:
            self._drop(older.update_id)

    def find(self, update_id: str, client_id: str, run_id: str) -> ExpectedUpdate | None:
        """The expectation that this update would meet."""
        expected = self._newest.get((client_id, run_id))
        return expected if expected is not None and expected.update_id == update_id else None
