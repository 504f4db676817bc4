"""Appointments, which connect a client's training with the secure sum of its update.

`sum_sessions` drives the session, `training_handler` the training. The clients agree on the masks
while the client trains.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, TypeVar

from potluck.common.errors import RoundClosedError
from potluck.secagg.protocol import Envelope, Expectation

T = TypeVar("T")


@dataclass(kw_only=True)
class Appointment:
    """One client's training, and the sum that its update goes into. Lives on the event loop.

    expected: the client's expectation of the sum, set once it has the round's model. agreed: set
    once the masks are agreed on. over: the last replies (empty, or a refusal); set once the update
    is delivered or has failed. said: set once `over` was taken for sending.
    """

    expected: asyncio.Future[Expectation] = field(default_factory=lambda: _future())
    agreed: asyncio.Future[None] = field(default_factory=lambda: _future())
    over: asyncio.Future[tuple[Envelope, ...]] = field(default_factory=lambda: _future())
    said: asyncio.Event = field(default_factory=asyncio.Event)
    session_id: bytes = b""

    def close(self, replies: tuple[Envelope, ...] = ()) -> None:
        """End the appointment, after the training has succeeded or failed."""
        for waiting in (self.expected, self.agreed):
            waiting.cancel()
        if not self.over.done():
            self.over.set_result(replies)


class Appointments:
    """The appointments of all clients of a host, by the update's id."""

    def __init__(self) -> None:
        self._made: dict[str, Appointment] = {}

    def of(self, update_id: str) -> Appointment:
        """Return the appointment of an update; make it at the first call."""
        return self._made.setdefault(update_id, Appointment())

    def close(self, update_id: str, replies: tuple[Envelope, ...] = ()) -> None:
        """Close an appointment, if there is one: its training is over."""
        appointment = self._made.pop(update_id, None)
        if appointment is not None:
            appointment.close(replies)

    async def expectation(self, update_id: str) -> Expectation:
        """Wait for the client's expectation of the sum of its update.

        Raises RoundClosedError if its training does not begin."""
        waiting = self.of(update_id).expected
        try:
            return await kept(waiting)
        finally:
            if not waiting.done():  # the training has never begun
                self.close(update_id)


async def kept(waiting: asyncio.Future[T]) -> T:
    """Wait for a future that has other waiters too. Raises RoundClosedError if it is cancelled."""
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if waiting.cancelled():
            raise RoundClosedError("the training that the secure sum is for is over") from None
        raise


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()
