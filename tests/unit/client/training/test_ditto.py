"""Ditto's personal model: the steps of its paper; and fine-tuning that changes no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from potluck.client.training.classification import Classification
from potluck.client.training.task_training import ClientFiles, LoadedTask, TrainingFiles
from potluck.common.errors import ProtocolError
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.names import ClientId
from potluck.common.settings.model_table import ModelTable
from potluck.common.tasks.digits import Digits
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.common.trainer import TrainingProgress
from potluck.common.updates.kept_states import PERSONAL
from potluck.rpc.v1 import coordinator_pb2 as rpc

TASK = Digits(clients=4, held_out=0.3, alpha=0.3)
CLIENT = "client-2"
WHOLE_BATCHES = {"learning_rate": 0.05, "momentum": 0.0, "batch_size": 10_000, "epochs": 3}


def loaded() -> Classification:
    return Classification(LoadedTask("digits", TASK, "cpu", None))


def weights(seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    return {name: tensor.numpy().copy() for name, tensor in TASK.model().state_dict().items()}


def files(folder: Path, model: Path, kept: Path | None = None) -> TrainingFiles:
    return TrainingFiles(
        model=model,
        kept={} if kept is None else {PERSONAL: kept},
        update=folder / "update",
        keep_at=folder.joinpath,
    )


def written(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    write_tensors(path, arrays)
    return path


def read(path: Path) -> dict[str, np.ndarray]:
    with open_tensors(path) as file:
        return {name: array.copy() for name, array in file.arrays.items()}


def instruction(pull: float | None, training: dict[str, Any], **other: Any) -> rpc.Instruction:
    work = rpc.Train(seed=7, training_json=json.dumps(training), **other)
    work.objective.name = "cross-entropy"
    if pull is not None:
        work.personal.pull = pull
        work.personal.training_json = json.dumps(training)
    return rpc.Instruction(client_id=CLIENT, round=1, train=work)


def trained(training: Classification) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in training.loaded.weights().items()}


def by_the_paper(
    begin: dict[str, np.ndarray], received: dict[str, np.ndarray], pull: float
) -> dict[str, np.ndarray]:
    """Return v after three steps v ← v − η·(∇F(v) + λ·(v − w)) over all samples."""
    network, data = TASK.model(), TASK.client_data(ClientId(CLIENT), None).train
    network.load_state_dict({name: torch.tensor(array) for name, array in begin.items()})
    anchor = [torch.tensor(array) for array in received.values()]
    for _ in range(3):
        network.zero_grad()
        inputs = data.inputs_at(torch.arange(len(data)))
        torch.autograd.backward(functional.cross_entropy(network(inputs), data.labels))
        with torch.no_grad():
            for tensor, near in zip(network.parameters(), anchor, strict=True):
                assert tensor.grad is not None
                tensor.sub_(0.05 * (tensor.grad + pull * (tensor - near)))
    return {name: tensor.numpy() for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("pull", [0.0, 0.5, 2.0])
def test_ditto_steps_equal_those_of_the_paper(tmp_path: Path, pull: float) -> None:
    model = written(tmp_path / "model", weights(1))
    own = written(tmp_path / "own", weights(2))
    loaded().train(
        instruction(pull, WHOLE_BATCHES), files(tmp_path, model, own), TrainingProgress()
    )
    wanted = by_the_paper(weights(2), weights(1), pull)
    for name, tensor in read(tmp_path / PERSONAL).items():
        np.testing.assert_allclose(tensor, wanted[name], rtol=1e-4, atol=1e-6)


def test_first_personal_model_starts_from_the_model_of_the_round(tmp_path: Path) -> None:
    model = written(tmp_path / "model", weights(1))
    outcome = loaded().train(
        instruction(0.5, WHOLE_BATCHES), files(tmp_path, model), TrainingProgress()
    )
    assert outcome.kept
    wanted = by_the_paper(weights(1), weights(1), 0.5)
    for name, tensor in read(tmp_path / PERSONAL).items():
        np.testing.assert_allclose(tensor, wanted[name], rtol=1e-4, atol=1e-6)


def test_update_is_identical_with_and_without_a_personal_model(tmp_path: Path) -> None:
    model, found = written(tmp_path / "model", weights(1)), []
    for pull in (None, 0.5):
        shares: list[float] = []
        training = loaded()
        work = instruction(pull, {"epochs": 2})
        outcome = training.train(work, files(tmp_path, model), TrainingProgress(shares.append))
        found.append((trained(training), outcome.samples, outcome.loss))
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
    assert found[0][1:] == found[1][1:]
    for name, tensor in found[0][0].items():
        assert np.array_equal(tensor, found[1][0][name])


def test_the_same_training_gives_the_same_personal_model(tmp_path: Path) -> None:
    model, found = written(tmp_path / "model", weights(1)), []
    for _ in range(2):
        loaded().train(instruction(0.1, {"epochs": 1}), files(tmp_path, model), TrainingProgress())
        found.append((tmp_path / PERSONAL).read_bytes())
    assert found[0] == found[1]


def test_personal_model_of_a_partly_trained_model_has_only_that_part(tmp_path: Path) -> None:
    head = {name: array for name, array in weights(1).items() if name.startswith("3.")}
    table = ModelTable(trainable=("3.*",))
    training = Classification(LoadedTask("digits", TASK, "cpu", None, table))
    model = written(tmp_path / "model", head)
    training.train(instruction(0.1, {"epochs": 1}), files(tmp_path, model), TrainingProgress())
    own = read(tmp_path / PERSONAL)
    assert own.keys() == head.keys()
    assert all(not np.array_equal(own[name], head[name]) for name in head)
    training.loaded.check_base()


def test_invalid_ditto_pull_is_refused(tmp_path: Path) -> None:
    for pull in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ProtocolError, match="must be a number ≥ 0"):
            loaded().check(instruction(pull, {}).train)


# Measuring ----------------------------------------------------------------------------------------


def evaluation(**changes: Any) -> rpc.Instruction:
    return rpc.Instruction(client_id=CLIENT, round=1, evaluate=rpc.Evaluate(seed=3, **changes))


def measured(folder: Path, work: rpc.Instruction, own: Path | None = None) -> EvaluationCounts:
    kept = {} if own is None else {PERSONAL: own}
    found = loaded().evaluate(
        work, ClientFiles(model=folder / "model", kept=kept), TrainingProgress()
    )
    assert isinstance(found, EvaluationCounts)
    return found


def test_evaluation_uses_the_personal_model_if_one_exists(tmp_path: Path) -> None:
    written(tmp_path / "model", weights(1))
    own = written(tmp_path / "own", weights(2))
    alone = measured(tmp_path, evaluation(), own)
    assert measured(tmp_path, evaluation(personal=True)).loss_sum == alone.loss_sum
    personal = measured(tmp_path, evaluation(personal=True), own)
    assert personal.loss_sum != alone.loss_sum
    written(tmp_path / "model", weights(2))
    assert measured(tmp_path, evaluation()).loss_sum == personal.loss_sum


def test_fine_tuning_before_an_evaluation_does_not_change_the_model(tmp_path: Path) -> None:
    written(tmp_path / "model", weights(1))
    work = instruction(None, {"epochs": 4})
    tuned = measured(tmp_path, evaluation(tuning=work.train))
    training = loaded()
    training.train(work, files(tmp_path, tmp_path / "model"), TrainingProgress())
    written(tmp_path / "trained", trained(training))
    (tmp_path / "model").rename(tmp_path / "before")
    (tmp_path / "trained").rename(tmp_path / "model")
    assert measured(tmp_path, evaluation()).loss_sum == tuned.loss_sum
    (tmp_path / "before").rename(tmp_path / "model")
    same = loaded()
    same.evaluate(
        evaluation(tuning=work.train), ClientFiles(model=tmp_path / "model"), TrainingProgress()
    )
    after = same.evaluate(evaluation(), ClientFiles(model=tmp_path / "model"), TrainingProgress())
    assert isinstance(after, EvaluationCounts)
    assert after.loss_sum == measured(tmp_path, evaluation()).loss_sum
