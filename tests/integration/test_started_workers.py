"""Worker processes that are not forked: what they import, and what crosses from them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from potluck.client.base.availability_plan import AvailabilityPlan
from potluck.client.training.processes.device_process import WorkerProcesses
from potluck.client.training.processes.training_worker import DeviceTerms, Done, Failed
from potluck.common.errors import TrainingError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a pipe tells workers of the end")
OWN = """
from potluck.client.training.processes.training_jobs import WorkerJob

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


def test_a_worker_finds_its_users_code_and_hands_back_what_it_can(
    processes: WorkerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, here = tmp_path / "own", tmp_path / "here"
    own.mkdir()
    here.mkdir()
    (own / "own_jobs.py").write_text(OWN)
    (here / "structlog.py").write_text("raise SystemExit('the current folder is no library')")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(own))
    own_jobs: Any = __import__("own_jobs")
    terms = DeviceTerms(
        device="cpu",
        threads=1,
        deterministic=False,
        data_directory=None,
        model_modules=(),
        availability=AvailabilityPlan(),
        choices=tmp_path,
    )
    connection = processes.take().connection
    connection.send(terms)
    answers = []
    for number in (7, 0, 8):
        connection.send(own_jobs.Give(number))
        assert connection.poll(60)
        answers.append(connection.recv())
    assert (answers[0], answers[2]) == (Done(7), Done(8))
    assert isinstance(answers[1], Failed)
    assert isinstance(answers[1].error, TrainingError)
    assert "can't hand back what came of its job" in str(answers[1].error)
