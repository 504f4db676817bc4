"""Runs coroutines so that they clean up after Ctrl-C or SIGTERM, even if it comes repeatedly."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer

Result = TypeVar("Result")


def run_interruptibly(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine. The first SIGINT, SIGTERM or SIGHUP cancels it; later ones are ignored.

    So the coroutine's `finally` blocks run to their end; they must not run for ever. Raises
    typer.Exit with 128 + the signal's number, as a shell reports it.
    """
    received: list[int] = []

    async def guarded() -> Result:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()

        def interrupt(number: int) -> None:
            if not received and task is not None:
                task.cancel()
            received.append(number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, interrupt, number)
        return await main

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if not received:
            raise
        raise typer.Exit(128 + received[0]) from None
