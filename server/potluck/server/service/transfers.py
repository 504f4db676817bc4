"""How many files are on their way at once between the coordinator and its hosts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from potluck.server.hosts.limits import Turns
from potluck.server.service.coordinator_metrics import Transfer

_TURNS: Final = 4
"""So many files move fast at once: more are not faster."""
_TURN_SECONDS: Final = 1.0
_TURN_BYTES: Final = 16 << 20
"""What moves less in that time leaves room for another."""


class Transfers:
    """Of so many transfers a few have their turn. Lives on the event loop."""

    def __init__(self, at_once: int) -> None:
        """`at_once`: see `concurrent_transfers` in `config.py`."""
        self._places = asyncio.Semaphore(at_once)
        self._turns = Turns(_TURNS, seconds=_TURN_SECONDS, least_bytes=_TURN_BYTES)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait until there is room for one more file."""
        async with self._places:
            yield

    @contextlib.asynccontextmanager
    async def turn(self, transfer: Transfer) -> AsyncIterator[None]:
        """Wait until it is this one's turn as well; it lasts while bytes move."""
        async with self._places, self._turns.turn(lambda: transfer.moved):
            yield
