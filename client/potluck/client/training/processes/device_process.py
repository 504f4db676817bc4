"""The host's side of a worker process: a seat whose trainings run in that process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from potluck.client.training.processes.training_jobs import ProgressBoard
from potluck.client.training.processes.training_worker import (
    DeviceTerms,
    Done,
    Failed,
    serve,
)
from potluck.client.training.processes.worker_count import WorkerPlan
from potluck.common.errors import PotluckError, RoundClosedError, TrainingError
from potluck.common.learning.measures import MeasureSums
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.names import ClientId
from potluck.common.trainer import TrainingProgress
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:  # imports torch, which takes seconds: only the worker's thread may do so
    from potluck.client.training.local_update import Trained
    from potluck.client.training.processes.training_jobs import SentFiles, WorkerJob
    from potluck.client.training.processes.worker_count import TrainingMemory
    from potluck.client.training.task_training import (
        ClientFiles,
        GroupMember,
        TrainingFiles,
        UnfitForLanesError,
    )

log = structlog.get_logger()

FORKED: Final = sys.platform == "linux"
"""True if workers are forked: elsewhere, system libraries may not work after a fork."""
_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from potluck.client.training.processes.training_worker import main; main()"
)
"""Code that starts a worker with the host's module search path. So it finds users' own code, and
doesn't import modules from the current folder in place of libraries."""
ATTEMPTS: Final = 5
"""Maximum number of attempts at a job.

A killed process is replaced, and its job is run again with the same result. A job fails after this
number of successive processes have ended during the job.
"""
_LOOK_SECONDS: Final = 0.1
"""Interval at which the host reads a training's progress and passes on a cancellation."""


class _Child:
    """A worker process that has been started."""

    def __init__(self, pid: int, connection: Connection, board: ProgressBoard) -> None:
        self.pid, self.connection, self.board = pid, connection, board
        self.process: subprocess.Popen[bytes] | None = None
        """The process object if the worker was not forked, else None."""
        self._ended: int | None = None
        self._ending = threading.Lock()
        board.release()  # the child has its own copy of the descriptor

    def end(self) -> int:
        """Kill the process. Returns its exit code, negative for a signal."""
        with self._ending:
            if self._ended is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, 9)
                with contextlib.suppress(ChildProcessError):
                    self._ended = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                if self.process is not None:
                    self.process.returncode = self._ended
            return self._ended or 0


class WorkerProcesses:
    """The worker processes of a host; they all end with the host."""

    def __init__(self, count: int, *, most_on_gpu: int = 1) -> None:
        """count, most_on_gpu: see `WorkerPlan`."""
        self.count, self.most_on_gpu = count, most_on_gpu
        self._life, self._lives = os.pipe()
        self._idle: list[_Child] = []
        self._all: list[_Child] = []
        self._changing = threading.Lock()
        self.closed = False

    def fork(self) -> None:
        """Fork the workers. They are ready at once, since they share the modules loaded here.

        Call this while the process has only one thread."""
        for _ in range(self.count):
            board, (ours, theirs) = ProgressBoard(), Pipe()
            pid = os.fork()
            if pid == 0:
                self._become_worker(board, ours, theirs)
            theirs.close()
            self._idle.append(self._started(pid, ours, board))

    def _become_worker(self, board: ProgressBoard, ours: Connection, theirs: Connection) -> None:
        code = 1
        try:
            os.close(self._lives)
            for connection in (ours, *(child.connection for child in self._all)):
                connection.close()
            serve(theirs, board.descriptor, self._life)
            code = 0
        finally:
            os._exit(code)

    def take(self) -> _Child:
        """Return a forked worker, or a new process that loads everything itself.

        Raises RoundClosedError once the processes are closed.
        """
        with self._changing:
            if self.closed:
                raise _stopping()
            with contextlib.suppress(IndexError):
                return self._idle.pop(0)
            board, (ours, theirs) = ProgressBoard(), Pipe()
            with theirs:
                passed = (theirs.fileno(), board.descriptor, self._life)
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-c",
                        _START,
                        _import_path(),
                        *map(str, passed),
                    ],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                )
            child = self._started(process.pid, ours, board)
            child.process = process
            return child

    def end(self, child: _Child) -> int:
        """End a process that will be replaced; return its exit code."""
        code = child.end()
        with self._changing:
            if not self.closed:
                self._all.remove(child)
        child.connection.close()
        return code

    def _started(self, pid: int, connection: Connection, board: ProgressBoard) -> _Child:
        child = _Child(pid, connection, board)
        self._all.append(child)
        return child

    def close(self) -> None:
        """End all processes; later calls do nothing."""
        with self._changing:
            if self.closed:
                return
            self.closed = True
        for child in self._all:
            child.end()
        for end in (self._life, self._lives):
            os.close(end)


@contextmanager
def worker_processes(plan: WorkerPlan) -> Iterator[WorkerProcesses | None]:
    """Yield the planned worker processes, or None if none are needed; end them after the block."""
    if not plan.needs_processes:
        yield None
        return
    processes = WorkerProcesses(plan.count, most_on_gpu=plan.most_on_gpu)
    try:
        if FORKED:
            processes.fork()
        yield processes
    finally:
        processes.close()


class DeviceProcess:
    """A `TrainingSeat` in another process.

    If that process has ended, the next job starts a new one.
    """

    def __init__(self, processes: WorkerProcesses, terms: DeviceTerms) -> None:
        self._processes, self._terms = processes, terms
        self._child: _Child | None = self._begun()

    def check(self, work: rpc.Train, layout: bytes) -> None:
        """Check that the training `work` could begin."""
        from potluck.client.training.processes.training_jobs import CheckOne

        self._do(CheckOne(work=work.SerializeToString(), layout=layout), [TrainingProgress()])

    def train(
        self,
        instruction: rpc.Instruction,
        files: TrainingFiles,
        *,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> Trained:
        """Train a client and write its update."""
        from potluck.client.training.processes.training_jobs import SentFiles, TrainOne

        sent = SentFiles.of(files)
        job = TrainOne(instruction=instruction.SerializeToString(), files=sent)
        with _cleaning_up([sent]):
            trained: Trained = self._do(job, [TrainingProgress(progress, cancelled)])
        return trained

    def train_together(
        self, members: Sequence[GroupMember], companions: Sequence[ClientId]
    ) -> Sequence[Trained | PotluckError | UnfitForLanesError]:
        """Train clients in one batched step and write their updates."""
        from potluck.client.training.processes.training_jobs import (
            SentFiles,
            SentMember,
            TrainGroup,
        )

        sent = [
            SentMember(
                instruction=each.instruction.SerializeToString(),
                files=SentFiles.of(each.files),
                lane=each.lane,
            )
            for each in members
        ]
        job = TrainGroup(members=sent, companions=list(companions))
        with _cleaning_up([each.files for each in sent]):
            found: Sequence[Trained | PotluckError | UnfitForLanesError] = self._do(
                job, [m.progress for m in members]
            )
        return found

    def memory_of(
        self,
        instruction: rpc.Instruction,
        files: ClientFiles,
        *,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> TrainingMemory | None:
        """Measure the GPU memory of a training. Returns None if it can't be measured."""
        from potluck.client.training.processes.training_jobs import MemoryOfOne

        job = MemoryOfOne(instruction=instruction.SerializeToString(), files=files)
        found: TrainingMemory | None = self._do(job, [TrainingProgress(progress, cancelled)])
        return found

    def evaluate(
        self,
        instruction: rpc.Instruction,
        files: ClientFiles,
        *,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> EvaluationCounts | MeasureSums:
        """Measure a model on a client's held-out samples."""
        from potluck.client.training.processes.training_jobs import MeasureOne

        job = MeasureOne(instruction=instruction.SerializeToString(), files=files)
        found: EvaluationCounts | MeasureSums = self._do(
            job, [TrainingProgress(progress, cancelled)]
        )
        return found

    def restart(self) -> None:
        """End the process; the next job begins in a new one."""
        self._dismiss()

    def _do(self, job: WorkerJob, progresses: Sequence[TrainingProgress]) -> Any:
        """Run a job in the process and return its result.

        Raises the error that the job raises; TrainingError once `ATTEMPTS` processes have ended."""
        code = 0
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self._attempt(job, progresses)
            except (EOFError, ConnectionError):
                code = self._dismiss()
                if self._processes.closed:
                    raise _stopping() from None
                log.warning("a worker process has ended", code=code, attempt=attempt)
                if all(each.is_cancelled() for each in progresses):
                    raise RoundClosedError(
                        "the training was cancelled, because no run waits for it"
                    ) from None
                continue
            except BaseException:  # this thread was abandoned: no caller waits for the result
                self._dismiss()
                raise
            if isinstance(answer, Failed):
                raise answer.error
            return answer.value
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise TrainingError(
            f"a worker process {how}, {ATTEMPTS} times in a row; check that the machine has "
            "enough memory for all `workers`, or lower `workers`"
        )

    def _attempt(self, job: WorkerJob, progresses: Sequence[TrainingProgress]) -> Done | Failed:
        """Run a job in the process. Raises EOFError or ConnectionError if the process ends."""
        child = self._child = self._child or self._begun()
        child.board.clear()
        child.connection.send(job)
        while not child.connection.poll(_LOOK_SECONDS):
            for place, progress in enumerate(progresses):
                child.board.follow(place, progress)
        answer: Done | Failed = child.connection.recv()
        return answer

    def _begun(self) -> _Child:
        """Take a process and make it create its device."""
        child = self._processes.take()
        with contextlib.suppress(ConnectionError):  # the first job reports the cause
            child.connection.send(self._terms)
        return child

    def _dismiss(self) -> int:
        """End the process; return its exit code, or 0 if there was none."""
        child, self._child = self._child, None
        return 0 if child is None else self._processes.end(child)


def _import_path() -> str:
    return json.dumps([str(Path(each).absolute()) for each in sys.path])


def _stopping() -> RoundClosedError:
    return RoundClosedError("the host is stopping, so the training was cancelled")


@contextmanager
def _cleaning_up(files: Sequence[SentFiles]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in files:
            each.clean_up()
