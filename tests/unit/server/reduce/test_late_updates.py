"""Late updates against plain numpy."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from potluck.common.tensors.encoding import EncodedUpdate
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import NamedTensors
from potluck.server.reduce import late_updates
from potluck.server.reduce.late_updates import (
    RebasedUpdate,
    deviations_from_mean,
    shares_of_largest,
    staleness_weight,
)

BUFFERS = {"norm.running_var"}


def drawn(seed: int) -> NamedTensors:
    generator = np.random.default_rng(seed)
    arrays: dict[str, NDArray[np.generic]] = {
        "body.weight": generator.normal(size=(70, 9)).astype(np.float32),
        "norm.running_var": generator.uniform(0, 1, 9).astype(np.float32),
        "norm.batches": np.array(seed),
    }
    layout = Layout.of(arrays)
    return NamedTensors(layout=layout, arrays={t.name: arrays[t.name] for t in layout.tensors})


def rebased(seed: int) -> RebasedUpdate:
    """Return an update trained from the model of seed 100, rebased to that of seed 0."""
    late = drawn(seed)
    return RebasedUpdate(EncodedUpdate(late, late.layout), drawn(100), drawn(0), BUFFERS)


def test_staleness_weight_equals_the_worked_example_of_refl() -> None:
    """A worked example: τ = 1 and Λ = Λ_max."""
    assert staleness_weight(1, 1.0, beta=0.35) == pytest.approx(0.54624, abs=1e-5)


@pytest.mark.parametrize(("deviation", "weight"), [(0.0, 0.640), (1.0, 0.662)])
def test_staleness_weight_with_a_divisor_equals_the_authors_program(
    deviation: float, weight: float
) -> None:
    found = staleness_weight(1, deviation, beta=0.35, divisor=10)
    assert found == pytest.approx(weight, abs=5e-4)


@given(st.integers(1, 1000), st.floats(0, 1), st.floats(0, 1), st.sampled_from([1.0, 2.5, 10.0]))
def test_late_update_has_a_smaller_weight_than_a_fresh_one(
    age: int, share: float, beta: float, divisor: float
) -> None:
    weigh = functools.partial(staleness_weight, beta=beta, divisor=divisor)
    weight = weigh(age, share)
    assert 0 <= weight < 1
    expected = (1 - beta) / (age + 1) + beta * (1 - math.exp(-share) / divisor)
    assert weight == pytest.approx(expected)
    assert weigh(age + 1, share) <= weight
    assert weigh(age, min(1.0, share + 0.1)) >= weight


def test_late_update_is_its_delta_added_to_the_current_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    update = rebased(3)
    late, before, current = drawn(3).arrays, drawn(100).arrays, drawn(0).arrays
    found = update.decode_to_arrays()
    step = late["body.weight"] - before["body.weight"] + current["body.weight"]
    np.testing.assert_array_equal(found["body.weight"], step)
    np.testing.assert_array_equal(found["norm.running_var"], late["norm.running_var"])
    assert found["norm.batches"] == current["norm.batches"]
    whole = update.read(0, 639, np.empty(639, np.float32)).copy()
    for begin in range(0, 639, 50):  # pieces that cross borders of tensors
        end = min(begin + 50, 639)
        block = update.block(begin, end, np.empty(50, np.float32))
        np.testing.assert_array_equal(block, whole[begin:end])


@pytest.mark.parametrize("threads", [1, 4])
def test_deviations_of_late_updates_are_squared_distances_from_the_mean(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_updates, "BLOCK_ELEMENTS", 100)
    fresh = [drawn(seed) for seed in (1, 2, 3)]
    encoded = [EncodedUpdate(each, each.layout) for each in fresh]
    late = [rebased(seed) for seed in (4, 5)]
    found = deviations_from_mean(encoded, late, drawn(0), BUFFERS, threads=threads)
    mean = np.mean([each.arrays["body.weight"] for each in fresh], axis=0, dtype=np.float64)
    expected = [((each.decode_to_arrays()["body.weight"] - mean) ** 2).sum() for each in late]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_deviation_shares_are_relative_to_the_largest_deviation() -> None:
    assert shares_of_largest(np.array([1.0, 4.0])).tolist() == [0.25, 1.0]
    assert shares_of_largest(np.zeros(2)).tolist() == [0.0, 0.0], "no client deviates"
    assert shares_of_largest(np.zeros(0)).tolist() == []
