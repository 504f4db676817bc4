"""Blocking work in threads that ends soon after its caller was cancelled."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_unwanted: ContextVar[threading.Event | None] = ContextVar("unwanted", default=None)


class InterruptedWorkError(Exception):
    """Raised in a thread whose caller was cancelled."""


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, but for that a cancellation reaches the thread too.

    It does not wait for the thread: that goes on to where it next asks.
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
    """The function, which raises RuntimeError in place of StopIteration: a future can't hold that,
    and its waiter would never wake."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError("StopIteration: an iterator had no more items") from error

    return call


def interrupt(thread: int) -> bool:
    """Have InterruptedWorkError raised in a thread, by its identity, when it next runs Python code.

    It may be anywhere then: only for threads whose work and state are not used any more. Returns
    False, and raises nothing there, while the thread imports a module: a half-imported one would
    stay in the process, and every later import of it fails.
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
    """A function for long work to call between blocks, in this thread or in its helpers.

    Raises InterruptedWorkError once whoever waits for this thread has been cancelled.
    """
    unwanted = _unwanted.get()

    def check() -> None:
        if unwanted is not None and unwanted.is_set():
            raise InterruptedWorkError("nobody waits for this work any more")

    return check
