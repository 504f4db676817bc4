"""Krum, Multi-Krum and Bulyan against a second implementation, and against attackers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.strategy_rounds import Rounds, Sent, vector

from potluck.common.settings.plugins import create
from potluck.server.strategy import Strategy

with_files = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
Points = Mapping[str, tuple[float, ...]]


def model_after(name: str, sent: Points, folder: Path, **options: Any) -> list[float]:
    """Return tensor `w` after one round that starts from zero."""
    start = vector(*[0.0] * len(next(iter(sent.values()))))
    played = Rounds(create(Strategy, name, options), start, folder)
    model = played.play({client: Sent(weights=vector(*w)) for client, w in sent.items()})
    found: list[float] = model["w"].tolist()
    return found


def scored(points: Points, hostile: int) -> list[tuple[float, str]]:
    """Return the score of each client, smallest first, from differences instead of products."""
    found = []
    for client, w in points.items():
        apart = sorted(
            sum((a - b) ** 2 for a, b in zip(w, other, strict=True))
            for name, other in points.items()
            if name != client
        )
        found.append((sum(apart[: max(1, len(points) - hostile - 2)]), client))
    return sorted(found)


def drawn(clients: int, size: int, seed: int) -> dict[str, tuple[float, ...]]:
    points = np.random.default_rng(seed).normal(size=(clients, size)).astype(np.float32)
    return {f"k{i}": tuple(row) for i, row in enumerate(points.tolist())}


# The definitions ---------------------------------------------------------------------------------


def test_krum_equals_values_computed_by_hand(tmp_path: Path) -> None:
    """With n = 5 and f = 1, a score sums the distances to two neighbours."""
    sent = {"a": (0.0,), "b": (1.0,), "c": (2.5,), "d": (3.0,), "e": (9.0,)}
    assert [round(score, 9) for score, _ in scored(sent, 1)] == [2.5, 3.25, 4.25, 7.25, 78.25]
    assert model_after("krum", sent, tmp_path, hostile=0.2) == [2.5]
    assert model_after("multi-krum", sent, tmp_path, hostile=0.2, kept=2) == [1.75]
    # By default n − f = 4 updates are kept: all but the one far away.
    assert model_after("multi-krum", sent, tmp_path, hostile=0.2) == [1.625]


def test_bulyan_equals_values_computed_by_hand(tmp_path: Path) -> None:
    """n = 7, f = 1: Krum selects five clients, and three of their values are averaged."""
    sent = {"a": 0.0, "b": 1.0, "c": 2.0, "d": 4.0, "e": 5.0, "f": 7.0, "g": 99.0}
    points = {client: (w,) for client, w in sent.items()}
    chosen: list[str] = []
    while len(chosen) < 5:
        _, best = scored({c: w for c, w in points.items() if c not in chosen}, 1)[0]
        chosen.append(best)
    assert chosen == ["c", "d", "b", "e", "a"]
    # The median of 0, 1, 2, 4, 5 is 2; the three nearest are 2, 1, and of 0 and 4 the lower.
    assert model_after("bulyan", points, tmp_path, hostile=0.2) == [1.0]


@with_files
@given(clients=st.integers(1, 12), share=st.floats(0, 0.49), seed=st.integers(0, 2**32))
def test_krum_equals_a_second_implementation(
    tmp_path: Path, clients: int, share: float, seed: int
) -> None:
    sent = drawn(clients, 3, seed)
    hostile = max(0, min(int(share * clients + 1e-9), (clients - 3) // 2))
    order = [client for _, client in scored(sent, hostile)]
    assert model_after("krum", sent, tmp_path, hostile=share) == list(sent[order[0]])
    mean = np.mean([sent[client] for client in order[: clients - hostile]], axis=0)
    kept = model_after("multi-krum", sent, tmp_path, hostile=share)
    np.testing.assert_allclose(kept, mean, rtol=1e-6, atol=1e-7)


@with_files
@given(clients=st.integers(1, 15), share=st.floats(0, 0.24), seed=st.integers(0, 2**32))
def test_bulyan_equals_a_second_implementation(
    tmp_path: Path, clients: int, share: float, seed: int
) -> None:
    sent = drawn(clients, 3, seed)
    hostile = max(0, min(int(share * clients + 1e-9), (clients - 3) // 4))
    left, chosen = dict(sent), []
    for _ in range(clients - 2 * hostile):
        _, best = scored(left, hostile)[0]
        chosen.append(left.pop(best))
    expected = []
    for values in zip(*chosen, strict=True):
        median = sorted(values)[(len(values) - 1) // 2]
        near = sorted(values, key=lambda value: (abs(value - median), value))
        expected.append(np.mean(near[: clients - 4 * hostile]))
    found = model_after("bulyan", sent, tmp_path, hostile=share)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


# Attackers ---------------------------------------------------------------------------------------


@with_files
@given(
    hostile=st.integers(1, 3),
    size=st.floats(50, 1e30),
    together=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_krum_with_distant_attackers_selects_an_honest_update(
    tmp_path: Path, hostile: int, size: float, together: bool, seed: int
) -> None:
    """The f attackers among n = 2f + 3 clients are anywhere far away, or all at one point."""
    honest = drawn(hostile + 3, 4, seed)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (hostile, 4))
    attacks = {
        f"a{i}": tuple((size * signs[0 if together else i] * (1 if together else i + 1)).tolist())
        for i in range(hostile)
    }
    found = model_after("krum", honest | attacks, tmp_path, hostile=0.49)
    assert tuple(found) in honest.values()
    kept = model_after("multi-krum", honest | attacks, tmp_path, hostile=0.49)
    np.testing.assert_allclose(kept, np.mean(list(honest.values()), axis=0), rtol=1e-6, atol=1e-6)


@with_files
@given(hostile=st.integers(1, 3), size=st.floats(-1e30, 1e30), seed=st.integers(0, 2**32))
def test_bulyan_result_stays_between_honest_values(
    tmp_path: Path, hostile: int, size: float, seed: int
) -> None:
    """n = 4f + 3: f attackers with one absurd coordinate can't move any beyond the honest ones."""
    honest = drawn(3 * hostile + 3, 3, seed)
    first = np.array(next(iter(honest.values())))
    attacks = {f"a{i}": (size, *first[1:].tolist()) for i in range(hostile)}
    found = model_after("bulyan", honest | attacks, tmp_path, hostile=0.249)
    values = np.array(list(honest.values()))
    assert (found >= values.min(axis=0) - 1e-6).all()
    assert (found <= values.max(axis=0) + 1e-6).all()


# Ties and order ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["krum", "multi-krum", "bulyan"])
def test_krum_and_bulyan_are_independent_of_client_order(name: str, tmp_path: Path) -> None:
    """Also with equal updates, whose distance is a rounding error."""
    sent = drawn(5, 3, 7)
    sent |= {"k5": sent["k2"], "k6": sent["k2"]}
    found = {
        tuple(model_after(name, dict(order), tmp_path, hostile=0.2))
        for order in itertools.islice(itertools.permutations(sent.items()), 0, 5040, 501)
    }
    # A mean may round differently in another order.
    assert len(found) <= (1 if name != "multi-krum" else 3)


def test_krum_breaks_equal_scores_by_client_name(tmp_path: Path) -> None:
    """Four corners of a square have equal scores."""
    corners = {"d": (1.0, 1.0), "b": (-1.0, 1.0), "c": (1.0, -1.0), "a": (-1.0, -1.0)}
    assert model_after("krum", corners, tmp_path) == [-1.0, -1.0]
    assert model_after("multi-krum", corners, tmp_path, kept=2) == [-1.0, 0.0]
