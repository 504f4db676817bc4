"""Updates of a client that keeps its normalisation, as FedBN has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from potluck.client.training.classification import Classification
from potluck.client.training.local_update import train_update
from potluck.client.training.task_training import ClientFiles, LoadedTask, TrainingFiles
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.names import ClientId
from potluck.common.settings.model_table import ModelTable
from potluck.common.task import ClientData, Examples, Task
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.common.trainer import TrainingProgress
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

Arrays = dict[str, NDArray[Any]]
TABLE = ModelTable(keep=("norm.*",), keep_seed=5)


class Network(nn.Module):
    """A network of a body, a normalisation and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.norm(self.body(inputs)))
        return outputs


@dataclass(frozen=True, kw_only=True)
class Shifted(Task):
    """Task whose inputs have another mean at each client."""

    classes = 2
    training: ClassVar = {"batch_size": 8, "epochs": 1, "learning_rate": 0.1}

    def model(self) -> nn.Module:
        return Network()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        number = int(client.rpartition("-")[2])
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(32, 3, generator=generator)
        examples = Examples(inputs=inputs + 10 * number, labels=(inputs[:, 0] > 0).long())
        return ClientData(train=examples, held_out=examples)

    def evaluation_data(self, data: Path | None) -> Examples | None:
        return None


@pytest.fixture
def training() -> Classification:
    return Classification(LoadedTask("shifted", Shifted(), "cpu", None, TABLE))


def read(path: Path) -> Arrays:
    with open_tensors(path) as file:
        return {name: array.copy() for name, array in file.arrays.items()}


def trained(
    training: Classification, folder: Path, client: str, before: Path | None = None
) -> tuple[Path, Arrays]:
    """Train once; return the path of the client's kept tensors, and its update."""
    folder.mkdir()
    model = folder / "model"
    torch.manual_seed(0)
    arrays = {n: t.numpy() for n, t in Network().state_dict().items() if "norm" not in n}
    write_tensors(model, arrays)
    work = rpc.Train(seed=1, training_json="{}", encoding=transfer_pb2.ENCODING_FLOAT32)
    work.objective.name = "cross-entropy"
    done = train_update(
        training,
        rpc.Instruction(client_id=client, round=1, train=work),
        TrainingFiles(
            model=model,
            update=folder / "update",
            keep_at=lambda purpose: folder / f"kept-{purpose}",
            kept={} if before is None else {"model": before},
        ),
        progress=lambda _: None,
        cancelled=lambda: False,
    )
    assert done.outcome.kept
    return folder / "kept-model", read(folder / "update")


def test_kept_normalisation_is_not_sent_and_continues_in_the_next_round(
    training: Classification, tmp_path: Path
) -> None:
    first, update = trained(training, tmp_path / "1", "client-1")
    assert set(update) == {"body.weight", "body.bias", "head.weight", "head.bias"}
    kept = read(first)
    assert set(kept) == {f"norm.{name}" for name in nn.BatchNorm1d(4).state_dict()}
    assert kept["norm.num_batches_tracked"] == 4
    other, _ = trained(training, tmp_path / "2", "client-2")
    assert read(other)["norm.num_batches_tracked"] == 4, "nothing of the client before it"
    again, _ = trained(training, tmp_path / "3", "client-1")
    assert again.read_bytes() == first.read_bytes()
    second, _ = trained(training, tmp_path / "4", "client-1", before=first)
    assert read(second)["norm.num_batches_tracked"] == 8
    assert not np.array_equal(read(second)["norm.weight"], kept["norm.weight"])


def test_client_evaluates_the_model_with_its_kept_tensors(
    training: Classification, tmp_path: Path
) -> None:
    def loss(**kept: Path) -> float:
        work = rpc.Instruction(client_id="client-1", evaluate=rpc.Evaluate())
        files = ClientFiles(model=tmp_path / "1" / "model", kept=kept)
        found = training.evaluate(work, files, TrainingProgress())
        assert isinstance(found, EvaluationCounts)
        return found.loss_sum

    own, _ = trained(training, tmp_path / "1", "client-1")
    other, _ = trained(training, tmp_path / "2", "client-9")
    first = loss()
    losses = [loss(model=own), loss(model=other), first]
    assert len(set(losses)) == 3
    assert loss() == first, "nothing is left of what others keep"
    assert loss(model=own) == losses[0]
