"""Worker processes that end, and hosts that stop while one trains."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from potluck.client.base.availability_plan import AvailabilityPlan
from potluck.client.training.processes.device_process import DeviceProcess, WorkerProcesses
from potluck.client.training.processes.training_jobs import ProgressBoard
from potluck.client.training.processes.training_worker import DeviceTerms
from potluck.client.training.task_training import ClientFiles
from potluck.common.errors import RoundClosedError, StorageError, TrainingError
from potluck.common.trainer import TrainingProgress
from potluck.rpc.v1 import coordinator_pb2 as rpc

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def processes() -> Iterator[WorkerProcesses]:
    made = WorkerProcesses(1)
    yield made
    made.close()


def device(processes: WorkerProcesses, folder: Path) -> DeviceProcess:
    terms = DeviceTerms(
        device="cpu",
        threads=1,
        deterministic=False,
        data_directory=None,
        model_modules=(),
        availability=AvailabilityPlan(),
        choices=folder,
    )
    return DeviceProcess(processes, terms)


def measure(device: DeviceProcess, working: threading.Event) -> None:
    device.evaluate(
        rpc.Instruction(),
        ClientFiles(model=Path("model")),
        progress=lambda _: working.set(),
        cancelled=lambda: False,
    )


def test_ended_worker_processes_leave_no_file_descriptors_open(
    processes: WorkerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    worker, before = device(processes, tmp_path), 0
    for _ in range(3):
        with pytest.raises(TrainingError, match="ended with exit code 1, 5 times"):
            measure(worker, threading.Event())
        now = len(list(Path("/proc/self/fd").iterdir()))
        assert now <= (before or now)  # others may close theirs meanwhile
        before = now


def test_progress_board_works_without_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nothing"))
    board = ProgressBoard()
    other = ProgressBoard(os.dup(board.descriptor))
    seen: list[float] = []
    other.at(3).note(0.5)
    board.follow(3, TrainingProgress(seen.append, lambda: True))
    assert seen == [0.5]
    assert other.at(3).is_cancelled()
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(StorageError, match="set TMPDIR to a folder"):
        ProgressBoard()


def test_worker_process_is_not_restarted_while_the_host_stops(
    processes: WorkerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hanging))
    worker, working = device(processes, tmp_path), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        measured = thread.submit(measure, worker, working)
        assert working.wait(30)
        processes.close()
        with pytest.raises(RoundClosedError, match="the host is stopping"):
            measured.result(30)
    with pytest.raises(RoundClosedError):
        processes.take()
