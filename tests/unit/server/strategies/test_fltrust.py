"""FLTrust on a model of one layer, against numbers worked out from the coordinator's update."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from potluck.common.errors import ConfigurationError, TrainingError
from potluck.common.tensors.model_arrays import load_arrays, state_arrays
from potluck.server.plan.plan import draw_up
from potluck.server.reduce.training_job import public_labels
from potluck.server.strategies.fltrust import FLTrust
from potluck.server.strategy import ServerTraining, Weights

Arrays = dict[str, NDArray[Any]]
Doubles = NDArray[np.float64]
INPUTS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -1.0]])
LABELS = torch.tensor([0, 1, 1, 0])
OPTIONS = FLTrust(epochs=2, batch_size=2, learning_rate=0.1)


@dataclass(frozen=True)
class Update:
    client: str
    arrays: Arrays

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self.arrays[name].astype(np.float32)

    def weights(self) -> Weights:
        return self.arrays

    def auxiliary(self, name: str) -> Weights:
        raise KeyError(name)


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2, bias=False)


def move(
    network: nn.Module,
    updates: Sequence[Arrays],
    strategy: FLTrust,
    labels: torch.Tensor | None = LABELS,
) -> None:
    """Make a round's model of these updates, in the network."""
    strategy.train(
        ServerTraining(
            network=network,
            weights=lambda: {name: array.copy() for name, array in state_arrays(network).items()},
            load=lambda arrays: load_arrays(network, arrays),
            updates=[Update(f"k{place}", arrays) for place, arrays in enumerate(updates)],
            inputs=INPUTS,
            seed=5,
            round=1,
            progress=lambda _: None,
            labels=labels,
        )
    )


def trained(
    moves: Sequence[Doubles], strategy: FLTrust = OPTIONS, labels: torch.Tensor | None = LABELS
) -> Doubles:
    """Return the model's move, if each client moves the weights (2 × 2) by one of `moves`."""
    network = layer()
    before = network.weight.detach().double().numpy().copy()
    updates: list[Arrays] = [{"weight": (before + each).astype(np.float32)} for each in moves]
    move(network, updates, strategy, labels)
    after: Doubles = network.weight.detach().double().numpy() - before
    return after


def root(momentum: float = 0.0) -> Doubles:
    """Return the coordinator's update, with its steps written out."""
    network, velocity = layer(), torch.zeros(2, 2)
    before = network.weight.detach().double().numpy().copy()
    order = torch.Generator().manual_seed(5)
    for _ in range(2):
        shuffled = torch.randperm(4, generator=order)
        for batch in (shuffled[:2], shuffled[2:]):
            network.zero_grad()
            chances = torch.softmax(network(INPUTS[batch]), 1)
            wrong = chances - nn.functional.one_hot(LABELS[batch], 2)
            with torch.no_grad():
                velocity = momentum * velocity + wrong.T @ INPUTS[batch] / 2
                network.weight -= 0.1 * velocity
    found: Doubles = network.weight.detach().double().numpy() - before
    return found


def expected(moves: Sequence[Doubles], own: Doubles) -> Doubles:
    """Return the move by the paper's equations 2 to 4, step by step as written there."""
    total, trust = np.zeros_like(own), 0.0
    for move in moves:
        cosine = (move * own).sum() / (np.linalg.norm(move) * np.linalg.norm(own))
        score = max(cosine, 0.0)
        total += score * np.linalg.norm(own) / np.linalg.norm(move) * move
        trust += score
    return total / trust if trust else total


def test_the_coordinators_own_update_is_used_if_a_client_sends_it() -> None:
    np.testing.assert_allclose(trained([root()]), root(), rtol=1e-4, atol=1e-6)


def test_an_opposed_update_is_ignored_and_a_long_one_gets_the_root_norm() -> None:
    own = root()
    alone = trained([1e6 * own])
    np.testing.assert_allclose(np.linalg.norm(alone), np.linalg.norm(own), rtol=1e-4)
    np.testing.assert_allclose(trained([own, -50 * own]), own, rtol=1e-4, atol=1e-6)
    assert not trained([-own, -2 * own]).any(), "without trust the model stays"
    assert not trained([np.zeros_like(own)]).any()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), clients=st.integers(1, 6), step=st.sampled_from([0.5, 1.0]))
def test_fltrust_agrees_with_the_papers_equations(seed: int, clients: int, step: float) -> None:
    generator = np.random.default_rng(seed)
    moves = list(generator.normal(size=(clients, 2, 2)) * 10 ** generator.uniform(-1, 2))
    own = root()
    strategy = FLTrust(epochs=2, batch_size=2, learning_rate=0.1, step_size=step)
    found = trained(moves, strategy)
    np.testing.assert_allclose(found, step * expected(moves, own), rtol=1e-3, atol=1e-4)
    assert np.linalg.norm(found) <= step * np.linalg.norm(own) * 1.001
    again = trained(list(reversed(moves)), strategy)
    np.testing.assert_allclose(again, found, atol=1e-6)


def test_the_coordinators_training_has_momentum() -> None:
    strategy = FLTrust(epochs=2, batch_size=2, learning_rate=0.1, momentum=0.9)
    own = root(0.9)
    assert not np.allclose(own, root(), rtol=0.1)
    np.testing.assert_allclose(trained([own], strategy), own, rtol=1e-4, atol=1e-6)


def test_running_statistics_are_averaged_by_trust() -> None:
    """An update's direction and length leave them out."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2, bias=False))
    begun = {name: array.copy() for name, array in state_arrays(network).items()}
    own = FLTrust(epochs=2, batch_size=2, learning_rate=0.1)
    twin = copy.deepcopy(network)
    move(twin, [begun], own)  # an update of length 0 is not trusted, so the model stays
    np.testing.assert_array_equal(state_arrays(twin)["1.weight"], begun["1.weight"])

    step = np.ones((2, 2), np.float32)
    updates = [
        begun | {"1.weight": begun["1.weight"] + sign * step, "0.running_mean": np.full(2, mean)}
        for sign, mean in ((1, np.float32(3.0)), (-1, np.float32(-7.0)), (1, np.float32(5.0)))
    ]
    move(network, updates, own)
    found = state_arrays(network)
    moved = found["1.weight"] - begun["1.weight"]
    trusted = 4.0 if moved[0, 0] > 0 else -7.0
    np.testing.assert_allclose(found["0.running_mean"], [trusted] * 2, rtol=1e-5)
    np.testing.assert_allclose(moved, np.full((2, 2), moved[0, 0]), rtol=1e-4)
    assert moved.any()


def test_one_label_for_each_sample_is_needed() -> None:
    with pytest.raises(TrainingError, match="one label for each public sample"):
        trained([root()], labels=None)


def test_a_diverged_training_names_the_setting() -> None:
    wild = FLTrust(learning_rate=3e38, momentum=0.99, epochs=20, batch_size=2)
    with pytest.raises(TrainingError, match="lower learning_rate of strategy fltrust"):
        trained([root()], wild)


@pytest.mark.parametrize("task", ["digits", "colored-digits"])
def test_tasks_with_public_images_give_their_labels(task: str) -> None:
    run = f'[task]\nname = "{task}"\npublic = 40\n[strategy]\nname = "fltrust"\n'
    plan = draw_up(run, source="test")
    labels, inputs = public_labels(plan, None), plan.task.public_data(None)
    assert labels is not None
    assert inputs is not None
    assert len(labels) == len(inputs) == 40


def test_a_task_without_labels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = draw_up('[task]\nname = "digits"\n[strategy]\nname = "fltrust"\n', source="test")
    monkeypatch.setattr(type(plan.task), "public_labels", lambda _, data: data)
    with pytest.raises(ConfigurationError, match="fltrust needs labels of the public samples"):
        public_labels(plan, None)
    assert public_labels(draw_up('[task]\nname = "digits"\n', source="test"), Path()) is None
