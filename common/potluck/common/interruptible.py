"""Runs blocking work in threads.

The work ends soon after the code that waits for it is cancelled.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

# Work that ends soon ------------------------------------------------------------------------------

P = ParamSpec("P")
T = TypeVar("T")

_unwanted: ContextVar[threading.Event | None] = ContextVar("unwanted", default=None)


class InterruptedWorkError(Exception):
    """Raised in a thread whose caller was cancelled."""


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread, as `asyncio.to_thread` does, and pass a cancellation on to the
    thread.

    A cancelled call does not wait for the thread, which runs until it next calls the check that
    `interruption` returns.
    """
    unwanted = threading.Event()
    token = _unwanted.set(unwanted)
    try:
        return await asyncio.to_thread(_without_stop(function), *args, **kwargs)
    except asyncio.CancelledError:
        unwanted.set()
        raise
    finally:
        _unwanted.reset(token)


def _without_stop(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, wrapped so that it raises RuntimeError in place of StopIteration.

    A future can't have StopIteration as its exception: the code that awaits it would never
    continue.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError("StopIteration: an iterator had no more items") from error

    return call


def interrupt(thread: int) -> bool:
    """Raise InterruptedWorkError in a thread when it next runs Python code. thread: identity of the
    thread.

    The error may be raised at any place, so use this only for threads whose work and state are no
    longer needed. While the thread imports a module, return False and raise nothing: a
    half-imported module would stay in the process, and every later import of it would fail.
    """
    if _imports(thread):
        return False
    error = ctypes.py_object(InterruptedWorkError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
    return True


def _imports(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def interruption() -> Callable[[], None]:
    """Return a check for long work to call now and then, in this thread or in its helper threads.

    The check raises InterruptedWorkError once the caller that waits for this thread was cancelled.
    """
    unwanted = _unwanted.get()

    def check() -> None:
        if unwanted is not None and unwanted.is_set():
            raise InterruptedWorkError("the work was interrupted: its caller was cancelled")

    return check


# Work that is not cancelled -----------------------------------------------------------------------


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, even if the caller is cancelled; return its result.

    A cancellation is raised after `work` has ended; the result is then lost. Use this for work that
    must not be interrupted, such as a thread's use of a file that the caller then closes.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieve it: asyncio logs exceptions that were never retrieved
        raise
