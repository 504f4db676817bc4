"""A process that has imported all modules and forks other processes.

`forked_processes.py` runs it as `python -m potluck.deploy.local.fork_server FD LABEL`. A new
process needs seconds to import torch. A forked process has torch at once, and shares its memory. FD
is a stream socket. Requests and replies are JSON, one per line:

    {"program": "potluck-client", "arguments": [...], "log": "...", "environment": {...}}
    {"begun": PID}                       in the order of the requests
    {"ended": PID, "code": CODE}         128 + N if signal N ended it, as in a shell

`environment` replaces all variables. Folders of its PYTHONPATH come first on the search path.

Each forked process has its own session. When the other end of the socket is closed for any reason,
all forked processes get SIGTERM, and SIGKILL if they still run after the grace period. If this
process is killed, the kernel kills them. LABEL only marks the process in the list of processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from potluck.client.handlers.selection_guard import GUARD
from potluck.common.errors import PluginError
from potluck.common.net.build_version import software_versions
from potluck.common.settings import plugins

GRACE_SECONDS = 5.0
"""Seconds that a process has to end after SIGTERM, before it gets SIGKILL."""

PROGRAMS: Mapping[str, str] = {
    "potluck-client": "potluck.client.cli",
    "potluck-server": "potluck.server.cli",
}
"""Programs that can be forked, and the module with the `main` of each."""

_IMPORTED = (
    "numpy.random",
    "potluck.client.agent",
    "potluck.client.training.classification",
    "potluck.client.training.device",
    "potluck.server.service.serving",
)
_MOST_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>; forks are for Linux


class ForkServer:
    """The fork server's main loop. It has one thread: a fork copies only the calling thread."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lines = b""
        self._children: set[int] = set()
        self._woken, waker = os.pipe()
        self._pipe = (self._woken, waker)
        for end in self._pipe:
            os.set_blocking(end, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing wakes the loop
        signal.set_wakeup_fd(waker)

    def serve(self) -> None:
        """Fork the requested programs until the other end of the socket is closed."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._take_requests():
                        return
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, _MOST_BYTES)
                    self._reap()

    def end_all(self) -> None:
        """End all forked processes, by SIGKILL if necessary."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while self._children and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.01)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _take_requests(self) -> bool:
        try:
            received = self._control.recv(_MOST_BYTES)
        except ConnectionError:
            received = b""
        *lines, self._lines = (self._lines + received).split(b"\n")
        for line in lines:
            self._fork(json.loads(line))
        return bool(received)

    def _fork(self, request: dict[str, Any]) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _end_with(server)
            self._leave()
            raise Forked(request)
        self._children.add(pid)
        self._say({"begun": pid})

    def _reap(self) -> None:
        for pid in list(self._children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._children.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                self._say({"ended": pid, "code": code if code >= 0 else 128 - code})

    def _say(self, reply: dict[str, int]) -> None:
        with contextlib.suppress(ConnectionError):
            self._control.sendall(json.dumps(reply).encode() + b"\n")

    def _leave(self) -> None:
        """Release the server's resources in a forked process."""
        self._children.clear()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        self._control.close()
        for end in self._pipe:
            os.close(end)


def _end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends.

    Usually the parent ends this process earlier. The kernel sends the signal when the *thread* that
    forked ends; the parent has only one thread.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl was called
        os._exit(128 + signal.SIGKILL)


class Forked(BaseException):
    """Raised in a forked process, so that it leaves the server's loop."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__()
        self.request = request


def run(request: dict[str, Any]) -> None:
    """Run the requested program; ends with SystemExit."""
    os.setsid()
    with Path(request["log"]).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in places if each and each not in sys.path]
    program = request["program"]
    sys.argv = [program, *request["arguments"]]
    with contextlib.suppress(OSError):  # sets the name in `ps`, if the file exists
        Path("/proc/self/comm").write_text(program)
    importlib.import_module(PROGRAMS[program]).main()


def main() -> None:
    """Serve the inherited socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one handles Ctrl-C
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for module in (*PROGRAMS.values(), *_IMPORTED):
        importlib.import_module(module)
    of_all = [(plugins.SECURE_SUMS, name) for name in plugins.installed(plugins.SECURE_SUMS)]
    for group, name in (*of_all, (plugins.INTEGRATIONS, GUARD)):  # every host loads these
        with contextlib.suppress(PluginError):  # the program that needs it reports it
            plugins.find_callable(group, name)
    software_versions()  # cached here; otherwise each forked process asks git
    gc.collect()
    gc.freeze()  # garbage collection in a forked process would copy all shared memory
    server = ForkServer(control)
    try:
        server.serve()
        server.end_all()
    except Forked as forked:
        run(forked.request)


if __name__ == "__main__":
    main()
