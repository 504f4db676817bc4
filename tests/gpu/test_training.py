"""Training on a device: close to training on the CPU, reproducible, within its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from potluck.client.base.worker import Worker
from potluck.client.objective import Batch, LocalContext, Objective
from potluck.client.training.classification import Classification
from potluck.client.training.local_update import train_update
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.samples import DeviceSamples
from potluck.client.training.steps.loop import TrainingContext, train
from potluck.client.training.steps.smaller_batches import within_memory
from potluck.client.training.task_training import LoadedTask, TrainingFiles
from potluck.common.errors import DeviceMemoryError
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import create
from potluck.common.task import Examples
from potluck.common.tasks.digits import Digits
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

Arrays = Mapping[str, NDArray[Any]]


def on(device: str) -> Classification:
    return Classification(LoadedTask("digits", Digits(clients=6), device, None))


@cache
def first_weights() -> Arrays:
    """Return the initial weights of all clients.

    Computed once, because other threads draw from the global generator too.
    """
    torch.manual_seed(0)
    return state_arrays(Digits(clients=6).model())


def updated(training: Classification, folder: Path, client: str, **settings: Any) -> Arrays:
    """Train a client; return its update as read from its file."""
    folder.mkdir(parents=True)
    write_tensors(folder / "model", first_weights())
    lines = LocalTraining(learning_rate=0.05, batch_size=16, epochs=2, **settings)
    work = rpc.Train(
        seed=1,
        training_json=lines.model_dump_json(exclude_unset=True),
        encoding=transfer_pb2.ENCODING_FLOAT32,
    )
    work.objective.name = "cross-entropy"
    train_update(
        training,
        rpc.Instruction(client_id=client, round=1, train=work),
        TrainingFiles(model=folder / "model", update=folder / "update", keep_at=folder.with_name),
        progress=lambda _: None,
        cancelled=lambda: False,
    )
    with open_tensors(folder / "update") as file:
        return {name: array.copy() for name, array in file.arrays.items()}


def distance(one: Arrays, other: Arrays) -> float:
    """Return the distance of two models, divided by the norm of the second."""
    apart = sum(float(((one[name] - other[name]) ** 2).sum()) for name in other)
    return float(np.sqrt(apart / sum(float((array**2).sum()) for array in other.values())))


def test_update_on_the_device_equals_that_on_the_cpu_up_to_rounding(
    device: str, tmp_path: Path
) -> None:
    found = updated(on(device), tmp_path / "there", "client-1")
    expected = updated(on("cpu"), tmp_path / "here", "client-1")
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    assert distance(found, expected) <= (0 if device == "cpu" else 1e-3)
    assert distance(updated(on("cpu"), tmp_path / "other", "client-2"), expected) > 1e-2


def test_bfloat16_training_takes_effect_only_on_a_gpu_and_keeps_float32_weights(
    device: str, tmp_path: Path
) -> None:
    training = on(device)
    exact = updated(training, tmp_path / "exact", "client-1")
    found = updated(training, tmp_path / "fast", "client-1", precision="bfloat16")
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    if device == "cpu":
        assert distance(found, exact) == 0
    else:
        assert 0 < distance(found, exact) < 0.1


def test_clients_trained_in_parallel_have_the_weights_of_sequential_trainings(
    devices: tuple[str, str], tmp_path: Path
) -> None:
    clients = ["client-0", "client-1", "client-2", "client-3"]
    first_weights()  # compute them before threads start

    async def trained(folder: Path, *makes: str) -> list[Arrays]:
        worker = Worker(*(partial(on, make) for make in makes))

        def update(client: str, training: Classification) -> Arrays:
            return updated(training, folder / client, client)

        try:
            return await asyncio.gather(
                *(worker.run(partial(update, client)) for client in clients)
            )
        finally:
            worker.close()

    together = asyncio.run(trained(tmp_path / "together", *devices))
    alone = asyncio.run(trained(tmp_path / "alone", devices[0]))
    for one, other in zip(together, alone, strict=True):
        assert distance(one, other) <= (0 if devices[0] == "cpu" else 1e-3)


# The loop


def blobs(samples: int = 48) -> Examples:
    """Return two clouds of points, one per class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 2
    inputs = torch.randn(samples, 4, generator=generator) + 2.0 * labels[:, None]
    return Examples(inputs=inputs, labels=labels)


def network(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.ReLU(), nn.Linear(8, 2))


def trained(device: str, objective: Objective | None = None, **changes: Any) -> Arrays:
    model = network(dropout=changes.pop("dropout", 0.0))
    context = TrainingContext(classes=2, seed=3, round=1, device=torch.device(device))
    settings = LocalTraining(**{"learning_rate": 0.1, "batch_size": 8} | changes)
    train(model, blobs(), objective or CrossEntropy(), settings, context)
    return {name: array.copy() for name, array in state_arrays(model).items()}


def generator_state(device: str) -> Tensor:
    """Return the state of the device's global random generator."""
    if device == "cpu":
        return torch.get_rng_state()
    return torch.cuda.get_rng_state(device)


def test_dropout_on_the_device_depends_on_the_seed_and_restores_the_generator(device: str) -> None:
    before = generator_state(device)
    first = trained(device, dropout=0.5)
    torch.manual_seed(1)  # the state after the network was created
    torch.rand(17, device=device)
    again = trained(device, dropout=0.5)
    assert distance(again, first) <= (0 if device == "cpu" else 1e-6)
    assert distance(trained(device), first) > 1e-3
    made = generator_state(device)
    trained(device, dropout=0.5)
    assert torch.equal(generator_state(device), made)
    assert before.shape == made.shape


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("balanced-softmax", {}),
        ("fedlc", {}),
        ("fedntd", {}),
        ("fedprox", {"mu": 0.1}),
        ("fedrs", {}),
        ("focal", {}),
        ("generalized-cross-entropy", {}),
        ("noise-robust", {}),
        ("symmetric-cross-entropy", {}),
    ],
)
def test_every_objective_trains_on_the_device_as_on_the_cpu(
    device: str, name: str, options: Mapping[str, float]
) -> None:
    found = trained(device, create(Objective, name, dict(options)))
    assert distance(found, trained("cpu", create(Objective, name, dict(options)))) <= 1e-3


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_every_optimizer_trains_on_the_device_as_on_the_cpu(device: str, optimizer: str) -> None:
    found = trained(device, optimizer=optimizer, learning_rate=0.01, gradient_clip=1.0)
    alike = trained("cpu", optimizer=optimizer, learning_rate=0.01, gradient_clip=1.0)
    assert distance(found, alike) <= 1e-3


# Memory


class Hungry(CrossEntropy):
    """Objective that takes `each` bytes of the GPU per sample; a processor fails above `most`."""

    def __init__(self, each: int, most: int) -> None:
        super().__init__()
        self.each, self.most, self.seen = each, most, list[int]()

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        self.seen.append(len(logits))
        if logits.is_cuda:
            torch.empty(len(logits) * self.each, dtype=torch.uint8, device=logits.device)
        elif len(logits) * self.each > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().loss(logits, batch, local)


def hungry(device: str) -> Hungry:
    """Return an objective that has memory for 12 samples at once."""
    free = 12_000 if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    return Hungry(free // 12, free)


def test_batches_too_large_for_the_device_are_halved(device: str) -> None:
    objective, model = hungry(device), network()
    begin = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def attempt(settings: LocalTraining) -> int:
        model.load_state_dict(begin)
        context = TrainingContext(classes=2, seed=3, round=1, device=torch.device(device))
        return train(model, blobs(), objective, settings, context).steps

    settings = LocalTraining(batch_size=32, smallest_batch_size=4)
    steps, used = within_memory(attempt, settings)
    assert (steps, used.batch_size) == (6, 8)
    assert objective.seen == [32, 16, 8, 8, 8, 8, 8, 8]
    with pytest.raises(DeviceMemoryError, match=r"too little memory for this model"):
        within_memory(attempt, LocalTraining(batch_size=32))


def test_samples_are_copied_to_the_gpu_once(device: str) -> None:
    there, mine = DeviceSamples(torch.device(device)), blobs()
    first = there.of("a", mine)
    assert first.labels.device == torch.device(device)
    assert there.of("a", mine) is first
    assert (first is mine) == (device == "cpu")
