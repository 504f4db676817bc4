"""RHFL with one model per client: their assignment, and learning from one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray
from support.strategy_rounds import Rounds, Sent

from potluck.common.errors import ConfigurationError, RunError
from potluck.common.models.ensemble import Ensemble, ensemble
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import load_arrays, state_arrays
from potluck.server.selection import Population
from potluck.server.state import State
from potluck.server.strategies.rhfl import confidence
from potluck.server.strategies.rhfl_logits import RHFLLogits, disagreement
from potluck.server.strategy import ServerTraining

Arrays = Mapping[str, NDArray[Any]]
KINDS = [
    {"name": "perceptron", "inputs": 3, "hidden": [width], "classes": 2, "dropout": 0.0}
    for width in (6, 4)
]


def reference(logits: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return the disagreement by the paper's sum, term by term."""
    exponentials = np.exp(logits - logits.max(axis=2, keepdims=True))
    p = exponentials / exponentials.sum(axis=2, keepdims=True)
    total = 0.0
    for k in range(len(p)):
        for i in range(len(p)):
            if i != k:
                total += weights[i] * (p[i] * np.log(p[i] / p[k])).sum(axis=1).mean()
    return total


SHAPES = st.tuples(st.integers(2, 5), st.integers(1, 4), st.integers(2, 4))
LOGITS = SHAPES.flatmap(
    lambda shape: arrays_of.arrays(np.float64, shape, elements=st.floats(-20, 20))
)


@given(LOGITS, st.data())
def test_disagreement_equals_that_computed_with_numpy(
    logits: NDArray[np.float64], data: st.DataObject
) -> None:
    weights = data.draw(arrays_of.arrays(np.float64, len(logits), elements=st.floats(0, 2)))
    found = disagreement(torch.from_numpy(logits), torch.from_numpy(weights))
    assert float(found) == pytest.approx(reference(logits, weights), rel=1e-9, abs=1e-9)


@given(LOGITS, st.data())
def test_disagreement_gradient_of_a_client_covers_only_its_own_terms(
    logits: NDArray[np.float64], data: st.DataObject
) -> None:
    """∂/∂z_k of Σ_{i≠k} w_i·KL(p_i‖p_k) is Σ_{i≠k} w_i·(p_k − p_i)/b, with each p_i constant."""
    weights = data.draw(arrays_of.arrays(np.float64, len(logits), elements=st.floats(0, 2)))
    leaf = torch.from_numpy(logits).clone().requires_grad_()
    found = disagreement(leaf, torch.from_numpy(weights))
    found.backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
    exponentials = np.exp(logits - logits.max(axis=2, keepdims=True))
    p = exponentials / exponentials.sum(axis=2, keepdims=True)
    gradient = np.zeros(0) if leaf.grad is None else leaf.grad.numpy()
    for k in range(len(p)):
        others = [i for i in range(len(p)) if i != k]
        wanted = sum(weights[i] * (p[k] - p[i]) for i in others) / logits.shape[1]
        np.testing.assert_allclose(gradient[k], wanted, rtol=1e-9, atol=1e-12)


@given(arrays_of.arrays(np.float32, (3, 2, 4), elements=st.floats(-(2.0**99), 2.0**99, width=32)))
def test_disagreement_of_extreme_logits_is_finite(logits: NDArray[np.float32]) -> None:
    leaf = torch.from_numpy(logits).clone().requires_grad_()
    found = disagreement(leaf, torch.ones(3))
    found.backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
    assert bool(found.isfinite())
    assert bool(leaf.grad is not None and leaf.grad.isfinite().all())


def made(members: int = 3, seed: int = 0) -> Ensemble:
    torch.manual_seed(seed)
    return ensemble(of=KINDS, members=members)


def population(*ids: str) -> Population:
    return Population(ids=list(ids), classes=2, samples=np.zeros(len(ids), np.int64))


def enrolled(strategy: RHFLLogits, state: State, *ids: str) -> State:
    return strategy.enrol(state, population(*ids), seed=1)


def test_each_client_keeps_its_own_ensemble_member() -> None:
    strategy = RHFLLogits(clients=3)
    state = enrolled(strategy, State(), "b", "c")
    late = enrolled(strategy, state, "b", "c", "a")
    assert [strategy.part(late, client) for client in "bca"] == [0, 1, 2]
    assert enrolled(strategy, state, "b", "c", "a").scalars == late.scalars, "a kill before commit"
    assert strategy.part(late, "d") is None
    with pytest.raises(RunError, match="models for 3 clients, but 4 take part; raise"):
        enrolled(strategy, late, "b", "c", "a", "d")


def plus(arrays: Arrays, value: float) -> Arrays:
    return {n: a + np.float32(value) if a.dtype.kind == "f" else a + 7 for n, a in arrays.items()}


def test_round_replaces_the_members_of_its_clients_and_stores_their_weights(
    tmp_path: Path,
) -> None:
    strategy, network = RHFLLogits(clients=3), made()
    played = Rounds(strategy, state_arrays(network), tmp_path, buffers=["confidence"])
    played.state = enrolled(strategy, played.state, "a", "b", "c")
    first = dict(played.model)
    played.play(
        {
            "a": Sent(weights=plus(first, 1.0), loss=2.0, samples=9),
            "c": Sent(weights=plus(first, 3.0), loss=2.0),
        }
    )
    for name, array in first.items():
        by = {"members.0": 1.0, "members.1": 0.0, "members.2": 3.0}.get(name[:9])
        if by is not None:
            np.testing.assert_allclose(played.model[name], array + np.float32(by), rtol=1e-6)
    assert played.model["confidence"].tolist() == [1.0, 0.0, 1.0], "1/(N − 1) at first"
    assert played.model["rounds"].tolist() == [1, 0, 1]

    second = dict(played.model)
    played.play(
        {
            "b": Sent(weights=second, loss=1.0),
            "c": Sent(weights=second, loss=1.0),
        }
    )
    shares = confidence(np.array([np.nan, 2.0]), np.array([1.0, 1.0]))
    assert played.model["confidence"].tolist() == pytest.approx([1.0, *shares])
    assert played.model["rounds"].tolist() == [1, 2, 2]
    for name in (name for name in second if name.startswith("members.")):
        assert np.array_equal(played.model[name], second[name]), "not moved by anything else"


def lesson(network: Ensemble, *, seed: int = 5, round_number: int = 4) -> ServerTraining:
    return ServerTraining(
        network=network,
        weights=lambda: {name: array.copy() for name, array in state_arrays(network).items()},
        load=lambda arrays: load_arrays(network, arrays),
        updates=[],
        inputs=torch.randn(101, 3, generator=torch.Generator().manual_seed(2)),
        seed=seed,
        round=round_number,
        progress=told.append,
    )


told: list[float] = []


def taught(
    rounds: Sequence[int], *, seed: int = 5, **options: Any
) -> tuple[Arrays, Arrays, float, float]:
    """Return the members before and after training, then the disagreement of those of round 4 on
    all public samples, before and after."""
    network = made()
    network.rounds.copy_(torch.tensor(rounds))
    network.confidence.copy_(torch.tensor([0.5, 0.5, 0.5]))
    school = lesson(network, seed=seed)
    told.clear()
    before = school.weights()
    chosen = [place for place, last in enumerate(rounds) if last == 4]

    def measured() -> float:
        with torch.inference_mode():
            logits = torch.stack([network.members[place](school.inputs) for place in chosen])
            return float(disagreement(logits, network.confidence[chosen]))

    start = measured()
    RHFLLogits(clients=3, **options).train(school)
    return before, school.weights(), start, measured()


def test_members_of_the_round_agree_more_after_deterministic_training() -> None:
    options: dict[str, Any] = {"epochs": 20, "batch_size": 25, "learning_rate": 0.01}
    before, after, start, end = taught([4, 3, 4], **options)
    assert end < start / 4
    assert told == pytest.approx([epoch / 20 for epoch in range(1, 21)])
    for name, array in before.items():
        moves = name.startswith(("members.0.", "members.2."))
        assert np.array_equal(array, after[name]) != moves, name
    _, again, _, _ = taught([4, 3, 4], **options)
    assert all(np.array_equal(after[name], again[name]) for name in after)
    _, other, _, _ = taught([4, 3, 4], seed=6, **options)
    assert not all(np.array_equal(after[name], other[name]) for name in after)


def test_single_member_of_a_round_is_unchanged() -> None:
    before, after, _, _ = taught([4, 3, 0])
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_member_with_weight_zero_does_not_influence_the_others() -> None:
    """With weights (1, 0) the first member stays exactly as it is, and the second follows it."""
    network = made(2)
    network.rounds.fill_(4)
    network.confidence.copy_(torch.tensor([1.0, 0.0]))
    school = lesson(network)
    before = school.weights()
    RHFLLogits(clients=2).train(school)
    after = school.weights()
    for name in (name for name in before if name.startswith("members.")):
        assert np.array_equal(before[name], after[name]) == name.startswith("members.0."), name


def test_rhfl_logits_refuses_an_incompatible_model_with_the_remedy() -> None:
    fits = state_arrays(made())
    RHFLLogits(clients=3).check_model(Layout.of(fits))
    others: list[Arrays] = [
        {"w": np.zeros(1, np.float32)},
        {name: array for name, array in fits.items() if name != "rounds"},
        state_arrays(made(4)),
    ]
    for tensors in others:
        with pytest.raises(ConfigurationError, match='name = "ensemble", members = 3, and `of`'):
            RHFLLogits(clients=3).check_model(Layout.of(tensors))
