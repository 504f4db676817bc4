"""Sketches of updates, and the trainings they are taken from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_plugins.potluck_trainers import Line

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy, check_question
from potluck.client.question import Question
from potluck.client.training.classification import Classification
from potluck.client.training.own_training import OwnTraining
from potluck.client.training.questions.sketch import Sketch, centroids, projected
from potluck.client.training.task_training import (
    ClientFiles,
    LoadedTask,
    TaskTraining,
    TrainingFiles,
)
from potluck.common.errors import ConfigurationError, DisclosureRefusedError, ProtocolError
from potluck.common.learning.measures import own_trainer
from potluck.common.settings.plugins import create
from potluck.common.tasks.digits import Digits
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.common.trainer import TrainingProgress
from potluck.rpc.v1 import coordinator_pb2 as rpc


def asked(settings: dict[str, Any], client: str = "client-1") -> rpc.Instruction:
    train = rpc.Train(seed=7, training_json=json.dumps(settings))
    train.objective.name = "cross-entropy"
    question = rpc.Question(kind="sketch", seed=7, train=train)
    return rpc.Instruction(client_id=client, round=1, question=question)


def digits() -> Classification:
    torch.manual_seed(0)
    return Classification(LoadedTask("digits", Digits(clients=4), "cpu", None))


def line() -> OwnTraining:
    task = Line()
    trainer = own_trainer(task, "line")
    assert trainer is not None
    return OwnTraining(LoadedTask("line", task, "cpu", None), trainer)


def model_file(training: TaskTraining, folder: Path) -> ClientFiles:
    write_tensors(folder / "model", state_arrays(training.loaded.model))
    return ClientFiles(model=folder / "model", own=folder / "own")


def test_projections_preserve_norms_and_differences_on_average() -> None:
    """E‖z‖² = ‖u‖², with a variance below 2 ‖u‖⁴ / numbers; z is linear in u, and differs by
    seed."""
    generator = np.random.default_rng(0)
    update = {
        "weight": generator.standard_normal((300, 1000)).astype(np.float32),
        "bias": generator.standard_normal(7).astype(np.float32),
    }
    square = sum(float((each.astype(np.float64) ** 2).sum()) for each in update.values())
    found = [float((projected(update, 22, seed) ** 2).sum()) for seed in range(40)]
    assert np.mean(found) == pytest.approx(square, rel=4 * (2 / 22 / 40) ** 0.5)
    twice = {name: 2 * each for name, each in update.items()}
    assert projected(twice, 22, 3) == pytest.approx(2 * projected(update, 22, 3))
    assert not np.array_equal(projected(update, 22, 3), projected(update, 22, 4))


def test_projection_adds_every_coordinate_once() -> None:
    for place in range(10):
        one = {"weight": np.zeros(10, np.float32)}
        one["weight"][place] = 3.0
        found = projected(one, 22, 5)
        assert sorted(abs(found)) == [0.0] * 21 + [3.0]


def test_update_is_recovered_from_enough_sketches() -> None:
    """A coordinator that chooses the seeds can solve linear equations (see the threat model)."""
    update = np.random.default_rng(6).standard_normal(60).astype(np.float32)
    units = np.eye(60, dtype=np.float32)
    seeds = range(4)
    told = np.concatenate([projected({"weight": update}, 22, seed) for seed in seeds])
    sums = np.concatenate(
        [np.stack([projected({"weight": unit}, 22, seed) for unit in units], 1) for seed in seeds]
    )
    assert np.linalg.lstsq(sums, told)[0] == pytest.approx(update, abs=1e-5)


def test_centroids_satisfy_the_lloyd_condition() -> None:
    values = np.random.default_rng(4).standard_normal(3000).astype(np.float32)
    found = centroids({"a": values[:1000].reshape(10, 100), "b": values[1000:]}, 5)
    again = abs(values[:, None] - found).argmin(axis=1)
    assert found == pytest.approx([values[again == each].mean() for each in range(5)], rel=1e-5)
    assert np.array_equal(np.sort(found), found)
    few = centroids({"a": np.array([1.0, 2.0], np.float32)}, 5)
    assert set(few) == {1.0, 2.0}


@pytest.mark.parametrize("make", [digits, line])
def test_sketch_is_of_the_update_that_a_training_in_the_run_would_give(
    make: Any, tmp_path: Path
) -> None:
    """This includes a task with its own trainer; no file of the training is left behind."""
    training = make()
    files = model_file(training, tmp_path)
    instruction = asked({"epochs": 1, "learning_rate": 0.05})
    told = Sketch(seed=9).answer(training.question_context(instruction, lambda: False, files))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    sketched = {n: a.copy() for n, a in state_arrays(training.loaded.model).items()}
    other = make()
    train = rpc.Instruction(client_id="client-1", round=1, train=instruction.question.train)
    other.train(
        train,
        TrainingFiles(
            model=files.model,
            update=tmp_path / "update",
            own=tmp_path / "own",
            keep_at=lambda purpose: tmp_path / purpose,
        ),
        TrainingProgress(),
    )
    after = state_arrays(other.loaded.model)
    assert all(np.array_equal(after[name], sketched[name]) for name in after), "the same training"
    with open_tensors(files.model) as tensors:
        update = {name: after[name] - tensors.arrays[name] for name in after}
    expected = projected(update, 22, 9)
    assert np.linalg.norm(expected) > 0
    assert [told[f"sketch-{number}"] for number in range(1, 23)] == pytest.approx(expected)


def test_sketch_without_run_settings_is_refused(tmp_path: Path) -> None:
    training = digits()
    instruction = rpc.Instruction(client_id="client-1", round=1, question=rpc.Question())
    context = training.question_context(instruction, lambda: False, model_file(training, tmp_path))
    with pytest.raises(ProtocolError, match="lacks the run's training settings"):
        Sketch().answer(context)


def test_sketch_is_refused_by_a_client_that_sends_only_masked_updates() -> None:
    check_question(DisclosurePolicy(questions=("sketch",)), "a", "sketch")
    masked = DisclosurePolicy(questions=("sketch", "loss"), updates="masked")
    check_question(masked, "a", "loss")
    with pytest.raises(DisclosureRefusedError, match=r"sums of an update.*`updates` is \"masked\""):
        check_question(masked, "a", "sketch")


@pytest.mark.parametrize("options", [{"numbers": 0}, {"numbers": 65}, {"method": "sum"}])
def test_sketch_option_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Question, "sketch", options)
