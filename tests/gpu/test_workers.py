"""Number of workers that share a device, from the measured memory of a training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from potluck.client.base.availability_plan import AvailabilityPlan
from potluck.client.base.worker import Worker
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.instruction_log import Entry
from potluck.client.handlers.measured_workers import MeasuredWorkers
from potluck.client.training.processes.device_process import DeviceProcess, WorkerProcesses
from potluck.client.training.processes.training_worker import DeviceTerms
from potluck.client.training.task_training import ClientFiles
from potluck.common.learning.task_loading import make_task
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import write_tensors
from potluck.rpc.v1 import coordinator_pb2 as rpc

MOST = 3


@pytest.fixture
def processes() -> Iterator[WorkerProcesses]:
    made = WorkerProcesses(1, most_on_gpu=MOST)
    yield made
    made.close()


async def test_number_of_training_processes_is_limited_by_device_memory(
    device: str, processes: WorkerProcesses, tmp_path: Path
) -> None:
    terms = DeviceTerms(
        device=device,
        threads=1,
        deterministic=False,
        data_directory=None,
        model_modules=(),
        availability=AvailabilityPlan(),
        choices=tmp_path / "choices",
        sharing=MOST,
    )
    torch.manual_seed(0)
    write_tensors(tmp_path / "model", state_arrays(make_task("digits", {"clients": 6}).model()))
    work = rpc.Train(seed=1, training_json='{"epochs": 2, "batch_size": 16}')
    work.objective.name = "cross-entropy"
    work.task.name, work.task.options_json = "digits", '{"clients": 6}'
    instruction = rpc.Instruction(id="it", client_id="client-0", round=1, train=work)
    entry = Entry(id="it", client_id="client-0", run_id="run", round=1, trains=True)
    active, files = (
        ActiveInstruction(instruction=instruction, entry=entry),
        ClientFiles(model=tmp_path / "model"),
    )
    make = partial(DeviceProcess, processes, terms)
    trainers: Worker[Any] = Worker(make)
    measured = MeasuredWorkers(
        trainers, [make], devices=device, most=MOST, choices=tmp_path / "choices"
    )
    memory = await trainers.run(
        lambda seat: seat.memory_of(
            instruction, files, progress=lambda _: None, cancelled=lambda: False
        )
    )
    await measured.settle(active, files)
    if device == "cpu":
        assert (memory, trainers.seats) == (None, 1)
    else:
        total = torch.cuda.get_device_properties(device).total_memory
        assert 0 < memory.peak < memory.free <= total
        assert trainers.seats == MOST, "digits are small"
        assert len(list((tmp_path / "choices").iterdir())) == 1
    trainers.close()
