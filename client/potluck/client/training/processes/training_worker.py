"""The worker process: runs training jobs, one after the other, until its host's process ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from potluck.client.base.availability_plan import AvailabilityPlan
from potluck.common.errors import TrainingError
from potluck.common.names import ClientId
from potluck.common.process.logs import LogFormat, LogLevel, configure_logging
from potluck.common.process.memory import keep_freed_memory, spare_what_is_loaded

if TYPE_CHECKING:
    from potluck.client.training.device import TrainingDevice
    from potluck.client.training.processes.training_jobs import WorkerJob

_ALONE: Final = 4
"""Exit code if the host's process has ended."""


@dataclass(frozen=True, kw_only=True)
class DeviceTerms:
    """Arguments of a training device; see `TrainingDevice`.

    deterministic: True for deterministic kernels on a GPU. log_format, log_level: format and level
    of the host's log.
    """

    device: str
    threads: int
    deterministic: bool
    data_directory: Path | None
    model_modules: tuple[str, ...]
    availability: AvailabilityPlan
    choices: Path
    sharing: int = 1
    log_format: LogFormat = LogFormat.AUTO
    log_level: LogLevel = LogLevel.INFO

    def make(self) -> TrainingDevice:
        """Make the device, in the thread that will use it. Imports torch."""
        from potluck.client.training.device import TrainingDevice, has_torch

        if self.deterministic and has_torch():
            from potluck.client.training.determinism import compute_deterministically

            compute_deterministically()
        made = TrainingDevice(
            device=self.device,
            threads=self.threads,
            data_directory=self.data_directory,
            model_modules=self.model_modules,
            forecast=self._forecast,
            choices=self.choices,
            sharing=self.sharing,
        )
        spare_what_is_loaded()
        return made

    def _forecast(self, client: ClientId, begin: float, end: float) -> float:
        now = time.time()
        return self.availability.forecast(client, now + begin, now + end)


@dataclass(frozen=True)
class Done:
    """The return value of a job."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """The error that a job raised."""

    error: Exception


def main() -> None:
    """Serve in a process that was not forked.

    The command line gives the inherited file descriptors of the connection, the board and the pipe.
    """
    connection, board, life = map(int, sys.argv[1:])
    serve(Connection(connection), board, life)


def serve(connection: Connection, board: int, life: int) -> None:
    """Carry out jobs until the host's process ends. The first message is the `DeviceTerms`.

    board: descriptor of the `ProgressBoard`. life: descriptor of a pipe that carries no data and is
    closed when the host's process ends.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the host handles it and ends this process
    threading.Thread(target=_leave_with, args=(life,), daemon=True).start()
    keep_freed_memory()
    with contextlib.suppress(OSError):  # name in `ps` and `top`; Linux only
        Path("/proc/self/comm").write_text("potluck-worker")
    with contextlib.suppress(EOFError, ConnectionError):
        terms: DeviceTerms = connection.recv()
        if not structlog.is_configured():  # a forked process has the host's configuration
            configure_logging(terms.log_format, terms.log_level)
        from potluck.client.training.processes.training_jobs import ProgressBoard, portable_error

        shared, device = ProgressBoard(board), None
        # each job reports the cause
        with contextlib.suppress(Exception, SystemExit, KeyboardInterrupt):
            device = terms.make()
        while True:
            job: WorkerJob = connection.recv()
            try:
                device = device or terms.make()
                answer: Done | Failed = Done(job.carry_out(device, shared))
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # no signal raises here
                answer = Failed(portable_error(error))
            _send(connection, answer)


def _send(connection: Connection, answer: Done | Failed) -> None:
    """Send a job's result. Raises ConnectionError or OSError if the host's process has ended."""
    try:
        connection.send(answer)
    except (OSError, EOFError):
        raise
    except Exception as error:  # pickling failed, so nothing has been sent yet
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        trouble = TrainingError(
            f"a worker process can't return the result of its job ({text}); check that the task "
            "returns plain numbers, or set workers = 1"
        )
        connection.send(Failed(trouble))


def _leave_with(life: int) -> None:
    """Wait for the end of the host's process, then end this process, even during a job."""
    while os.read(life, 1024):
        pass
    os._exit(_ALONE)
