"""Answers of the coordinator that many pages need at the same time; each is requested once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


class SharedAnswers(Generic[Answer]):
    """Answers by key, each valid for some seconds. Used on one event loop."""

    def __init__(self, seconds: float) -> None:
        """seconds: maximum age of an answer."""
        self._seconds = seconds
        self._asked: dict[str, tuple[float, asyncio.Task[Answer]]] = {}

    async def of(self, key: str, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return a recent or pending answer for `key`; call `ask` if there is none.

        Raises the errors of `ask`. Errors are not kept: the next call asks again.
        """
        now = time.monotonic()
        self._asked = {
            name: (at, asking)
            for name, (at, asking) in self._asked.items()
            if not asking.done() or (now - at < self._seconds and _has_answer(asking))
        }
        if key not in self._asked:
            self._asked[key] = now, asyncio.create_task(ask())
        return await asyncio.shield(self._asked[key][1])  # other pages may wait for it as well


def _has_answer(asking: asyncio.Task[Answer]) -> bool:
    return not asking.cancelled() and asking.exception() is None
