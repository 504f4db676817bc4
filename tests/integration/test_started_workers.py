"""Worker processes that are started, not forked: their imports and the results that they return."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from potluck.client.base.availability_plan import AvailabilityPlan
from potluck.client.training.processes.device_process import DeviceProcess, WorkerProcesses
from potluck.client.training.processes.training_worker import DeviceTerms, Done, Failed
from potluck.common.errors import PluginError, TrainingError
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a pipe tells workers of the end")
OWN = """
from potluck.client.training.processes.training_jobs import WorkerJob

class Raise(WorkerJob):
    def __init__(self, error):
        self.error = error

    def carry_out(self, seat, board):
        raise self.error


class Give(WorkerJob):
    def __init__(self, number):
        self.number = number

    def carry_out(self, seat, board):
        return self.number if self.number else lambda: None
"""


@pytest.fixture
def processes() -> Iterator[WorkerProcesses]:
    made = WorkerProcesses(1)
    yield made
    made.close()


def test_worker_imports_user_code_and_reports_results_that_cannot_be_pickled(
    processes: WorkerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, here = tmp_path / "own", tmp_path / "here"
    own.mkdir()
    here.mkdir()
    (own / "own_jobs.py").write_text(OWN)
    (here / "structlog.py").write_text("raise SystemExit('the current folder is not a library')")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(own))
    own_jobs: Any = __import__("own_jobs")
    connection = processes.take().connection
    connection.send(terms(tmp_path))
    answers = []
    stopped = map(own_jobs.Raise, (KeyboardInterrupt("own"), SystemExit(3)))
    for job in (own_jobs.Give(7), own_jobs.Give(0), *stopped, own_jobs.Give(8)):
        connection.send(job)
        assert connection.poll(60)
        answers.append(connection.recv())
    assert (answers[0], answers[-1]) == (Done(7), Done(8))
    assert isinstance(answers[1], Failed)
    assert isinstance(answers[1].error, TrainingError)
    assert "can't return the result of its job" in str(answers[1].error)
    for answer, text in zip(answers[2:4], ("KeyboardInterrupt at", "SystemExit at"), strict=True):
        assert isinstance(answer.error, TrainingError)
        assert answer.error.message.startswith(f"{text} own_jobs.py:")


def test_device_process_checks_a_training_and_is_restarted(
    processes: WorkerProcesses, tmp_path: Path
) -> None:
    others = children()  # fork servers that tests share
    seat = DeviceProcess(processes, terms(tmp_path))
    [before] = children() - others
    work = rpc.Train(task=rpc.Plugin(name="no-such-task", options_json="{}"))
    with pytest.raises(PluginError, match="'no-such-task' is not installed"):
        seat.check(work, b"")
    assert children() - others == {before}
    seat.restart()
    assert children() - others == set()
    work.task.name, work.objective.name = "digits", "cross-entropy"
    work.training_json = work.objective.options_json = "{}"
    work.encoding = transfer_pb2.ENCODING_FLOAT32
    seat.check(work, b"")
    assert before not in children()


def children() -> set[int]:
    """Return the ids of this process's child processes."""
    found = Path("/proc/self/task").glob("*/children")
    return {int(pid) for each in found for pid in each.read_text().split()}


def terms(folder: Path) -> DeviceTerms:
    return DeviceTerms(
        device="cpu",
        threads=1,
        deterministic=False,
        data_directory=None,
        model_modules=(),
        availability=AvailabilityPlan(),
        choices=folder,
    )
