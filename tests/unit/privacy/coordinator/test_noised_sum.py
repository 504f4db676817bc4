"""The sum of clipped updates with noise, compared with plain numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from potluck.common.run_file.run_settings import PrivateUpdates
from potluck.common.tensors.encoding import EncodedUpdate
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import NamedTensors
from potluck.privacy.accounting import GaussianSteps, rdp_of
from potluck.privacy.coordinator.noised_rounds import next_clip, noise_of_sum
from potluck.privacy.coordinator.noised_sum import (
    NoisedSum,
    Normals,
    opened_noised_sum,
    system_normals,
)
from potluck.server.plan.update_noise import CLIP, clip_of, with_clip, without_clip
from potluck.server.reduce.model_work import OpenedRound
from potluck.server.state import State

BUFFERS = frozenset({"mean"})
Arrays = Mapping[str, NDArray[Any]]


def arrays(seed: int, scale: float = 1.0, *, size: int = 1000) -> Arrays:
    generator = np.random.default_rng(seed)
    return {
        "weight": (scale * generator.standard_normal((size // 10, 10))).astype(np.float32),
        "mean": generator.standard_normal(7).astype(np.float32),
        "bias": (scale * generator.standard_normal(11)).astype(np.float32),
        "steps": np.array([seed], np.int64),
    }


def flat(values: Arrays) -> NDArray[np.float64]:
    parts = [values[name].reshape(-1) for name in ("weight", "mean", "bias")]
    return np.concatenate(parts).astype(np.float64)


def summed(
    updates: list[Arrays], model: Arrays, *, clip: float, clients: int, normals: Normals
) -> NoisedSum:
    tensors = NamedTensors(layout=Layout.of(model), arrays=model)
    encoded = [
        EncodedUpdate(NamedTensors(layout=tensors.layout, arrays=each), tensors.layout)
        for each in updates
    ]
    opened = OpenedRound(updates=encoded, model=tensors, buffers=BUFFERS)
    with opened_noised_sum(
        nullcontext(opened), clip=clip, noise_multiplier=2.0, clients=clients, normals=normals
    ) as found:
        return found


def no_noise(count: int) -> NDArray[np.float64]:
    return np.zeros(count)


def moves(updates: list[Arrays], model: Arrays) -> list[NDArray[np.float64]]:
    """Return the difference of each update from the model, without buffers."""
    found = [flat(each) - flat(model) for each in updates]
    for each in found:
        each[1000:1007] = 0.0
    return found


def test_sum_without_noise_equals_updates_clipped_by_their_global_norm() -> None:
    model, updates = arrays(0), [arrays(1, 0.01), arrays(2, 3.0), arrays(3, 1.0)]
    clip, differences = 40.0, moves(updates, model)
    scales = [min(1.0, clip / float(np.linalg.norm(each))) for each in differences]
    expected = np.sum([s * each for s, each in zip(scales, differences, strict=True)], axis=0) / 5
    total = summed(updates, model, clip=clip, clients=5, normals=no_noise)
    assert total.norms == pytest.approx([np.linalg.norm(each) for each in differences])
    assert (total.norms > clip).tolist() == [False, True, True]
    assert np.allclose(total.mean()(0, 1018), expected, rtol=1e-12, atol=1e-15)


def test_one_update_changes_the_sum_by_at_most_the_clip() -> None:
    model, hostile = arrays(0), arrays(1, 1e20)
    alone = summed([hostile], model, clip=0.5, clients=8, normals=no_noise)
    assert 8 * np.linalg.norm(alone.mean()(0, 1018)) == pytest.approx(0.5)


def test_missing_client_adds_nothing_and_keeps_the_divisor() -> None:
    model, updates = arrays(0), [arrays(1), arrays(2)]
    both = summed(updates, model, clip=1.0, clients=2, normals=no_noise)
    one = summed(updates[:1], model, clip=1.0, clients=2, normals=no_noise)
    other = summed(updates[1:], model, clip=1.0, clients=2, normals=no_noise)
    together = one.mean()(0, 1018) + other.mean()(0, 1018)
    assert np.allclose(both.mean()(0, 1018), together, atol=1e-15)


def test_buffers_keep_the_values_of_the_coordinator() -> None:
    model = arrays(0)
    total = summed([arrays(1)], model, clip=1.0, clients=1, normals=system_normals)
    found = total.mean()(0, 1018)
    assert not found[1000:1007].any()
    assert found[:1000].all()


def test_noise_in_the_sum_has_deviation_clip_times_multiplier() -> None:
    drawn: list[int] = []
    generator = np.random.default_rng(5)

    def normals(count: int) -> NDArray[np.float64]:
        drawn.append(count)
        return generator.standard_normal(count)

    model = arrays(0, size=200_000)
    updates = [arrays(1, size=200_000), arrays(2, size=200_000)]
    size, clip = 200_018, 0.25
    noisy = summed(updates, model, clip=clip, clients=4, normals=normals).mean()(0, size)
    exact = summed(updates, model, clip=clip, clients=4, normals=no_noise).mean()(0, size)
    noise = 4 * (noisy - exact)[:200_000]
    assert drawn == [size]
    assert np.std(noise) == pytest.approx(2.0 * clip, rel=0.01)
    assert abs(np.mean(noise)) < 5 * 2.0 * clip / math.sqrt(200_000)


def test_system_normals_are_distinct_and_have_the_correct_moments() -> None:
    found = system_normals(200_001)
    assert found.shape == (200_001,)
    assert len(np.unique(found)) == found.size
    assert np.isfinite(found).all()
    assert abs(found.mean()) < 5 / math.sqrt(found.size)
    assert found.var() == pytest.approx(1.0, abs=0.02)
    assert np.mean(found**4) == pytest.approx(3.0, abs=0.15)
    assert abs(np.corrcoef(found[:100_000], found[100_000:200_000])[0, 1]) < 0.02
    assert np.mean(np.abs(found) > 2) == pytest.approx(0.0455, abs=0.004)


# Adaptive clipping --------------------------------------------------------------------------------

ADAPTED = PrivateUpdates(
    unit="client",
    noise="coordinator",
    noise_multiplier=2.0,
    clip=1.0,
    clip_quantile=0.5,
    clip_quantile_share=0.2,
)


def test_privacy_loss_of_sum_and_count_equals_the_ledger_charge() -> None:
    of_sum = GaussianSteps(noise_multiplier=noise_of_sum(ADAPTED, 2.0))
    # The noise of the count has a standard deviation of 2/(2·√0.2), and a client changes the count
    # by 1/2.
    of_count = GaussianSteps(noise_multiplier=2.0 / math.sqrt(0.2))
    both = [one + other for one, other in zip(rdp_of(of_sum), rdp_of(of_count), strict=True)]
    assert both == pytest.approx(rdp_of(GaussianSteps(noise_multiplier=2.0)))


@pytest.mark.parametrize(
    ("scales", "change"), [([0.001] * 4, math.exp(-0.1)), ([9.0] * 4, math.exp(0.1))]
)
def test_adaptive_clip_follows_the_quantile_of_update_norms(
    scales: list[float], change: float
) -> None:
    model = {name: 0 * each for name, each in arrays(0).items()}
    updates = [arrays(number, scale) for number, scale in enumerate(scales)]
    total = summed(updates, model, clip=1.0, clients=4, normals=no_noise)
    assert next_clip(total, ADAPTED, 2.0) == pytest.approx(change)


def test_count_of_updates_within_the_clip_has_noise() -> None:
    total = summed([arrays(1)], arrays(0), clip=1.0, clients=10, normals=lambda n: np.ones(n))
    deviation = 2.0 / (2 * math.sqrt(0.2))
    noisy = 0.5 + (-0.5 + deviation) / 10
    assert next_clip(total, ADAPTED, 2.0) == pytest.approx(math.exp(-0.2 * (noisy - 0.5)))


def test_adaptive_clip_is_stored_beside_the_strategy_state() -> None:
    state = State(scalars={"momentum": 3}, arrays={})
    kept = with_clip(state, 0.7)
    assert clip_of(state, ADAPTED) == 1.0
    assert clip_of(kept, ADAPTED) == 0.7
    assert kept.scalars == {"momentum": 3, CLIP: 0.7}
    assert without_clip(kept) == state
