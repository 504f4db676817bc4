"""Clients trained in one batched step on a device: a GPU groups convolutions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from potluck.client.training.classification import Classification
from potluck.client.training.task_training import (
    GroupMember,
    LoadedTask,
    TrainedMember,
    TrainingFiles,
)
from potluck.common.models.lenet import lenet5
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples, Task
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import write_tensors
from potluck.common.trainer import TrainingProgress
from potluck.rpc.v1 import coordinator_pb2 as rpc

CLIENTS = [ClientId(f"client-{number}") for number in range(3)]


@dataclass(frozen=True, kw_only=True)
class Noise(Task):
    """Task with images of noise; each client has another number of images."""

    classes = 10

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return lenet5()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        number = int(client.rpartition("-")[2])
        generator = torch.Generator().manual_seed(number)
        labels = torch.arange(20 + 7 * number) % 10
        inputs = torch.randn(len(labels), 3, 32, 32, generator=generator)
        return ClientData(train=Examples(inputs=inputs, labels=labels))

    def evaluation_data(self, data: Path | None) -> None:
        return None


def member(client: ClientId, folder: Path) -> GroupMember:
    instruction = rpc.Instruction(
        id=f"run/1.1/{client}",
        client_id=client,
        run_id="run",
        round=1,
        train=rpc.Train(
            objective=rpc.Plugin(name="cross-entropy"),
            training_json=json.dumps({"batched": True, "batch_size": 8, "learning_rate": 0.05}),
            seed=100,
            companions=[f"run/1.1/{each}" for each in CLIENTS],
        ),
    )
    files = TrainingFiles(model=folder / "model", update=folder / client, keep_at=folder.joinpath)
    return GroupMember(
        instruction=instruction,
        files=files,
        progress=TrainingProgress(),
        lane=CLIENTS.index(client),
    )


def weights(training: Classification) -> Tensor:
    return torch.cat([each.detach().cpu().flatten() for each in training.loaded.model.parameters()])


def test_batched_training_on_the_device_equals_separate_trainings_on_the_cpu(
    device: str, tmp_path: Path
) -> None:
    write_tensors(tmp_path / "model", state_arrays(Noise().model()))
    there = Classification(LoadedTask("noise", Noise(), device, None))
    here = Classification(LoadedTask("noise", Noise(), "cpu", None))
    members = [member(client, tmp_path) for client in CLIENTS]
    found = []
    for each in there.train_together(members, CLIENTS):
        assert isinstance(each, TrainedMember)
        each.load()
        found.append(weights(there))
    for one, batched in zip(members, found, strict=True):
        here.train(one.instruction, one.files, one.progress)
        expected = weights(here)
        assert float((batched - expected).norm()) == pytest.approx(
            0, abs=1e-3 * float(expected.norm())
        )
    assert not torch.allclose(found[0], found[1], atol=1e-3)
