"""Stacked adapters of any ranks change a model by the mean of the full differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.strategy_rounds import Rounds, Sent

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.common.tensors.layout import Layout
from potluck.server.plan.plan import draw_up
from potluck.server.strategies.lora_stacking import LoraStacking
from potluck.server.strategy import Strategy

Arrays = dict[str, NDArray[Any]]

W = "model.q.base_layer.weight"
A = "model.q.lora_A.default.weight"
B = "model.q.lora_B.default.weight"
HEAD = "head.weight"
OUT, IN, RANK = 5, 7, 4


def start(generator: np.random.Generator) -> Arrays:
    def normal(*shape: int) -> NDArray[np.float32]:
        return generator.standard_normal(shape).astype(np.float32)

    return {
        W: normal(OUT, IN),
        A: normal(RANK, IN),
        B: np.zeros((OUT, RANK), np.float32),
        HEAD: normal(2, 3),
    }


def trained(model: Arrays, rank: int, generator: np.random.Generator) -> Arrays:
    """Return the weights of a client of this rank: the rest of both factors is zero."""
    down = model[A] + generator.standard_normal((RANK, IN)).astype(np.float32)
    up = generator.standard_normal((OUT, RANK)).astype(np.float32)
    down[rank:], up[:, rank:] = 0, 0
    return {A: down, B: up, HEAD: model[HEAD] + np.float32(rank)}


@given(
    clients=st.lists(st.tuples(st.integers(0, RANK), st.integers(1, 100)), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    scaling=st.sampled_from([0.5, 1.0, 4.0]),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_stacked_adapters_change_the_weights_by_the_mean_of_full_differences(
    tmp_path: Path, clients: list[tuple[int, int]], seed: int, scaling: float
) -> None:
    generator = np.random.default_rng(seed)
    rounds = Rounds(LoraStacking(scaling=scaling), start(generator), tmp_path)
    for _ in range(2):
        before = {name: np.array(array) for name, array in rounds.model.items()}
        sent = [trained(before, rank, generator) for rank, _ in clients]
        shares = np.array([samples for _, samples in clients]) / sum(n for _, n in clients)
        rounds.play(
            {
                f"k{index}": Sent(weights=weights, samples=samples)
                for index, (weights, (_, samples)) in enumerate(zip(sent, clients, strict=True))
            }
        )
        full = sum(
            share * scaling * (each[B].astype(np.float64) @ each[A].astype(np.float64))
            for share, each in zip(shares, sent, strict=True)
        )
        np.testing.assert_allclose(rounds.model[W], before[W] + full, rtol=1e-5, atol=1e-5)
        head = sum(share * each[HEAD] for share, each in zip(shares, sent, strict=True))
        np.testing.assert_allclose(rounds.model[HEAD], head, rtol=1e-5, atol=1e-5)


def test_stacked_adapters_differ_from_separate_means_of_the_factors(tmp_path: Path) -> None:
    """Two clients have factors of opposite sign: both products are 1, each factor's mean is 0."""
    model = {
        W: np.zeros((1, 1), np.float32),
        A: np.ones((1, 1), np.float32),
        B: np.zeros((1, 1), np.float32),
    }
    rounds = Rounds(LoraStacking(), model, tmp_path)
    pairs = {
        name: Sent(weights={A: np.full((1, 1), v, np.float32), B: np.full((1, 1), v, np.float32)})
        for name, v in (("k0", 1.0), ("k1", -1.0))
    }
    assert rounds.play(pairs)[W].tolist() == [[1.0]]


def test_next_round_starts_with_new_adapters(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    model = start(generator)
    sent = {"k0": Sent(weights=trained(model, 2, generator))}
    one = Rounds(LoraStacking(), model, tmp_path).play(sent)
    assert not one[B].any()
    assert np.abs(one[A]).max() <= 1 / np.sqrt(IN)
    assert np.linalg.matrix_rank(one[A]) == RANK
    assert not np.array_equal(one[A], model[A])
    assert list(one) == list(model)
    again = Rounds(LoraStacking(), model, tmp_path).play(sent)
    assert all(np.array_equal(one[name], again[name]) for name in one)


def shapes(**changed: tuple[int, ...] | None) -> Layout:
    """Return the layout of a model with one adapter; None leaves a tensor out."""
    named = {"w": W, "a": A, "b": B}
    found: dict[str, tuple[int, ...] | None] = {W: (OUT, IN), A: (RANK, IN), B: (OUT, RANK)}
    found |= {named.get(key, key): shape for key, shape in changed.items()}
    return Layout.place([(name, "F32", shape) for name, shape in found.items() if shape])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"w": None, "a": None, "b": None, "head": (3,)},
            "receive no adapters of this model; wrap",
        ),
        ({"w": None}, r"'model\.q\.base_layer\.weight' is not sent to clients; add"),
        ({"b": None}, r"'model\.q\.lora_B\.default\.weight' is not sent to clients"),
        ({"w": (IN, OUT)}, r"is \(7, 5\), and its adapters .* only adapters of nn\.Linear"),
        ({"a": (RANK, IN, 3, 3)}, r"only adapters of nn\.Linear"),
        ({"model.q.lora_magnitude_vector.default.weight": (OUT,)}, "not a factor of an adapter"),
        ({"model.k.base_layer.weight": (OUT, IN)}, "not a factor of an adapter"),
        ({"model.q.lora_A.other.weight": (RANK, IN)}, "has several adapters; keep only one"),
    ],
)
def test_lora_stacking_refuses_a_model_without_mergeable_adapters(
    changed: dict[str, tuple[int, ...] | None], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why) as error:
        LoraStacking().check_model(shapes(**changed))
    assert "\n" not in error.value.message


def test_lora_stacking_accepts_a_model_with_adapters_and_a_head() -> None:
    LoraStacking().check_model(shapes(head=(3, 2)))


def test_lora_stacking_with_secure_aggregation_or_scaffold_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="lora-stacking reads single updates"):
        draw_up(
            'secure_aggregation = true\n[task]\nname = "digits"\n'
            '[strategy]\nname = "lora-stacking"\n',
            source="run file",
        )
    with pytest.raises(ConfigurationError, match="scaffold and lora-stacking are not compatible"):
        create(Strategy, "scaffold", {"step": "lora-stacking"})
