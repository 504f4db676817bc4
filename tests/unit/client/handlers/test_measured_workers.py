"""GPU workers, whose number grows once the memory of a training is measured."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from potluck.client.base.worker import Worker
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.instruction_log import Entry
from potluck.client.handlers.measured_workers import MeasuredWorkers
from potluck.client.training.processes.worker_count import TrainingMemory
from potluck.client.training.task_training import ClientFiles
from potluck.common.errors import RoundClosedError, TrainingError
from potluck.rpc.v1 import coordinator_pb2 as rpc

FILES = ClientFiles(model=Path("model"))


@dataclass
class Gpu:
    """Fake GPU: a training takes 1 of 10 units of memory, and its process 2."""

    error: Exception | None = None
    seats: int = 0
    asked: list[str] = field(default_factory=list)

    def seat(self) -> Any:
        self.seats += 1
        return self

    def memory_of(self, instruction: rpc.Instruction, *_: Any, **__: Any) -> TrainingMemory:
        self.asked.append(instruction.id)
        if self.error is not None:
            raise self.error
        return TrainingMemory(peak=1, context=2, free=10)


def workers(gpu: Gpu, folder: Path, *, most: int = 8) -> tuple[Worker[Any], MeasuredWorkers]:
    trainers: Worker[Any] = Worker(gpu.seat)
    return trainers, MeasuredWorkers(
        trainers, [gpu.seat], devices="cuda:0", most=most, choices=folder
    )


def kept(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def active(name: str = "a", **work: Any) -> ActiveInstruction:
    instruction = rpc.Instruction(id=name, train=rpc.Train(training_json="{}", **work))
    entry = Entry(id=name, client_id="a", run_id="run", round=1, trains=True)
    return ActiveInstruction(instruction=instruction, entry=entry)


async def test_first_training_determines_the_stored_number_of_gpu_workers(tmp_path: Path) -> None:
    gpu = Gpu()
    trainers, measured = workers(gpu, tmp_path)
    await asyncio.gather(*(measured.settle(active(name), FILES) for name in "abc"))
    await trainers.run(lambda seat: None)
    assert (trainers.seats, gpu.asked) == (3, ["a"])
    trainers.close()
    again, measured = workers(gpu, tmp_path)
    await measured.settle(active("d"), FILES)
    assert (again.seats, gpu.asked) == (3, ["a"])
    again.close()
    other, measured = workers(gpu, tmp_path, most=2)
    await measured.settle(active("e"), FILES)
    assert (other.seats, gpu.asked) == (2, ["a", "e"])
    other.close()


async def test_failed_training_leaves_one_gpu_worker(tmp_path: Path) -> None:
    gpu = Gpu(error=TrainingError("it diverged"))
    trainers, measured = workers(gpu, tmp_path)
    await measured.settle(active("a"), FILES)
    await measured.settle(active("b"), FILES)
    assert (trainers.seats, gpu.asked) == (1, ["a"])
    assert not kept(tmp_path)
    trainers.close()


async def test_cancelled_training_leaves_the_gpu_measurement_to_the_next(tmp_path: Path) -> None:
    gpu = Gpu()
    trainers, measured = workers(gpu, tmp_path)
    gone = active("a")
    gone.stop()
    with pytest.raises(RoundClosedError):
        await measured.settle(gone, FILES)
    await measured.settle(active("b"), FILES)
    assert (trainers.seats, gpu.asked) == (3, ["b"])
    trainers.close()


async def test_gpu_memory_is_not_measured_for_a_maximum_of_one_worker(tmp_path: Path) -> None:
    gpu = Gpu()
    trainers, measured = workers(gpu, tmp_path, most=1)
    await measured.settle(active(), FILES)
    assert (trainers.seats, gpu.asked) == (1, [])
    trainers.close()
