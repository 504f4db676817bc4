"""Ends a serving process within seconds after SIGTERM or SIGINT.

A thread can't be stopped from outside: a plug-in's selection or one step of training may take any
time, and Python waits for its threads. So if threads keep a process from ending, the process exits
without waiting for them. Persistent data are written such that this exit loses no more than a kill
would.
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
"""Seconds after the signal within which the process must end cleanly."""

LAST_WORK_SECONDS = 1.0
"""Seconds that the process waits for its threads, after everything else is closed."""

_CODES = {signal.SIGTERM: 0, signal.SIGINT: INTERRUPTED}


class Ending:
    """Handles SIGTERM and SIGINT of this process while the block runs; use it in the main thread.

    A separate thread receives the signals, so that they have an effect even while a plug-in blocks
    the event loop.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that asked the process to end; None if there was none yet."""
        self._listeners: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []
        self._told, self._tells = socket.socketpair()
        self._tells.setblocking(False)

    @property
    def code(self) -> int:
        """The exit code for the signal; 0 without one."""
        return 0 if self.signal is None else _CODES[self.signal]

    def tell(self, listener: Callable[[], None]) -> None:
        """Call `listener` on this event loop once a signal has asked the process to end."""
        self._listeners.append((asyncio.get_running_loop(), listener))
        if self.signal is not None:
            listener()

    def leave_after(self, seconds: float, code: int) -> None:
        """Exit with this code if the process has not ended after `seconds`."""

        def leave() -> None:
            if seconds > LAST_WORK_SECONDS:
                log.warning("exiting before work has ended that can't be stopped", seconds=seconds)
            sys.stderr.flush()
            os._exit(code)

        timer = threading.Timer(seconds, leave)
        timer.daemon = True
        timer.start()

    def __enter__(self) -> Self:
        for number in _CODES:
            signal.signal(number, lambda *_: None)  # required for writes to the wakeup socket
        signal.set_wakeup_fd(self._tells.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._await_signal, name="signals", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the block, after everything is closed. If threads still run `LAST_WORK_SECONDS`
        later, exit the process without waiting for them."""
        signal.set_wakeup_fd(-1)
        self._tells.close()
        self.leave_after(LAST_WORK_SECONDS, self.code if kind is None else FAILED)

    def _await_signal(self) -> None:
        while numbers := self._told.recv(1):
            if self.signal is None and numbers[0] in _CODES:
                self.signal = signal.Signals(numbers[0])
                self.leave_after(GRACE_SECONDS, self.code)
                for loop, listener in list(self._listeners):
                    with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
                        loop.call_soon_threadsafe(listener)
        self._told.close()
