"""The end of a process that serves: asked for by SIGTERM or SIGINT, and there within seconds.

Nothing can stop a thread from outside: a plug-in's selection or one step of training may take any
time, and Python waits for its threads. So a process that should end, and can't, exits without them.
Whatever must last is written so that this loses no more than a kill would.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Self

import structlog

from potluck.common.process.command_line import FAILED, INTERRUPTED

log = structlog.get_logger()

GRACE_SECONDS = 4.5
"""Seconds for a process to end in good order once it has been asked to."""

LAST_WORK_SECONDS = 1.0
"""Seconds for threads to end once everything that must be closed is."""

_CODES = {signal.SIGTERM: 0, signal.SIGINT: INTERRUPTED}


class Ending:
    """Takes the signals of this process while the block runs; for its main thread.

    The signals come by a thread of their own, so that they count even while the event loop is
    blocked by what a plug-in does there.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that asked the process to end; None if there was none."""
        self._listeners: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []
        self._told, self._tells = socket.socketpair()
        self._tells.setblocking(False)

    @property
    def code(self) -> int:
        """The exit code that belongs to the signal."""
        return 0 if self.signal is None else _CODES[self.signal]

    def tell(self, listener: Callable[[], None]) -> None:
        """Have `listener` called on this event loop once the process is asked to end."""
        self._listeners.append((asyncio.get_running_loop(), listener))
        if self.signal is not None:
            listener()

    def leave_after(self, seconds: float, code: int) -> None:
        """Leave with this exit code if the process has not ended by then."""

        def leave() -> None:
            if seconds > LAST_WORK_SECONDS:
                log.warning("left amid work that can't be stopped", seconds=seconds)
            sys.stderr.flush()
            os._exit(code)

        timer = threading.Timer(seconds, leave)
        timer.daemon = True
        timer.start()

    def __enter__(self) -> Self:
        for number in _CODES:
            signal.signal(number, lambda *_: None)  # without one, Python does not tell the socket
        signal.set_wakeup_fd(self._tells.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._await_signal, name="signals", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the block, when all is closed: threads have `LAST_WORK_SECONDS` more."""
        signal.set_wakeup_fd(-1)
        self._tells.close()
        self.leave_after(LAST_WORK_SECONDS, self.code if kind is None else FAILED)

    def _await_signal(self) -> None:
        while numbers := self._told.recv(1):
            if self.signal is None and numbers[0] in _CODES:
                self.signal = signal.Signals(numbers[0])
                self.leave_after(GRACE_SECONDS, self.code)
                for loop, listener in list(self._listeners):
                    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                        loop.call_soon_threadsafe(listener)
        self._told.close()
