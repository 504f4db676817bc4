"""Distributed noise: the sum of the shares is discrete Laplace even if clients are lost."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from potluck.secagg.protocol import BrokenRuleError, Noise, Rule
from potluck.secagg.protocol.vectors.noise import noise_share, share_table

WORD = 2.0**128


def probabilities(epsilon: float, contributors: int) -> NDArray[np.float64]:
    """Return the probabilities of a share, a difference of two numbers, at −N … N.

    The share table has N + 1 entries.
    """
    cumulative = share_table(epsilon, 1, contributors).cumulative
    masses = np.diff([0, *cumulative]).astype(np.float64) / WORD
    return np.convolve(masses, masses[::-1])


def convolved(one: NDArray[np.float64], times: int) -> NDArray[np.float64]:
    total = np.ones(1)
    for _ in range(times):
        total = np.convolve(total, one)
    return total


def laplace(epsilon: float, half: int) -> NDArray[np.float64]:
    x = np.abs(np.arange(-half, half + 1))
    return np.asarray(math.tanh(epsilon / 2) * np.exp(-epsilon * x))


@pytest.mark.parametrize(("epsilon", "contributors"), [(1.0, 1), (1.0, 3), (0.5, 7), (2.0, 34)])
def test_sum_of_noise_shares_is_discrete_laplace(epsilon: float, contributors: int) -> None:
    total = convolved(probabilities(epsilon, contributors), contributors)
    assert np.abs(total - laplace(epsilon, total.size // 2)).max() <= 1e-14


@pytest.mark.parametrize("fraction", [(9, 1.10), (5, 1.68)])
def test_fewer_honest_noise_shares_weaken_the_privacy_gradually(
    fraction: tuple[int, float],
) -> None:
    honest, expected = fraction
    total = convolved(probabilities(1.0, 10), honest)
    middle = total[total.size // 2 - 25 : total.size // 2 + 26]
    ratios = middle[1:] / middle[:-1]
    realised = float(np.max(np.abs(np.log(ratios))))
    assert realised == pytest.approx(expected, abs=0.02)


def test_more_honest_noise_shares_never_weaken_the_privacy() -> None:
    total = convolved(probabilities(1.0, 4), 6)
    middle = total[total.size // 2 - 25 : total.size // 2 + 26]
    assert np.abs(np.log(middle[1:] / middle[:-1])).max() <= 1.0


def test_sampled_noise_sums_follow_the_discrete_laplace_distribution() -> None:
    generator = random.Random(5)
    noise = Noise(epsilon=1.0, sensitivity=1, contributors=4)
    samples = np.sum([noise_share(noise, 100_000, generator.randbytes) for _ in range(4)], axis=0)
    half = 8
    inner = np.bincount(np.clip(samples, -half, half) + half, minlength=2 * half + 1)
    expected = laplace(1.0, 60)
    middle = expected[60 - half : 60 + half + 1].copy()
    middle[0] = middle[-1] = expected[: 60 - half + 1].sum()
    assert stats.chisquare(inner, middle / middle.sum() * inner.sum()).pvalue > 1e-3


@pytest.mark.slow
def test_a_million_sampled_noise_sums_follow_the_discrete_laplace_distribution() -> None:
    generator = random.Random(6)
    noise = Noise(epsilon=0.5, sensitivity=1, contributors=3)
    samples = np.sum([noise_share(noise, 10**6, generator.randbytes) for _ in range(3)], axis=0)
    half = 16
    inner = np.bincount(np.clip(samples, -half, half) + half, minlength=2 * half + 1)
    expected = laplace(0.5, 120)
    middle = expected[120 - half : 120 + half + 1].copy()
    middle[0] = middle[-1] = expected[: 120 - half + 1].sum()
    assert stats.chisquare(inner, middle / middle.sum() * inner.sum()).pvalue > 1e-3


@pytest.mark.parametrize("lost", [0, 2])
def test_neighbouring_noisy_histograms_are_distinguishable_at_most_as_claimed(lost: int) -> None:
    # Four of six clients are certain to contribute. If two are lost, the noise is exactly that of
    # ε.
    generator = random.Random(7)
    noise = Noise(epsilon=1.0, sensitivity=1, contributors=4)
    draws = [noise_share(noise, 60_000, generator.randbytes) for _ in range(6 - lost)]
    here = np.sum(draws, axis=0)
    for threshold in range(-2, 4):  # beyond these, too few samples remain
        with_record, without = np.mean(here + 1 >= threshold), np.mean(here >= threshold)
        assert math.log(with_record / without) <= 1.0 + 0.05
        assert math.log((1 - without) / (1 - with_record)) <= 1.0 + 0.05


def test_replace_adjacency_needs_twice_the_noise() -> None:
    assert share_table(1.0, 2, 3).cumulative == share_table(0.5, 1, 3).cumulative


def test_noise_table_covers_the_whole_probability() -> None:
    for epsilon, contributors in [(1.0, 3), (0.01, 50), (20.0, 2)]:
        cumulative = share_table(epsilon, 1, contributors).cumulative
        assert list(cumulative) == sorted(cumulative)
        assert cumulative[-1] == 2**128
        left = stats.nbinom.sf(len(cumulative) - 1, 1 / contributors, -math.expm1(-epsilon))
        assert left < 2**-60
    table = share_table(1.0, 1, 3)
    assert table.sample(bytes(16)) == 0
    assert table.sample(b"\xff" * 16) == len(table.cumulative) - 1


@pytest.mark.parametrize("epsilon", [1e-5, 1e-12])
def test_noise_for_a_very_small_epsilon_is_refused(epsilon: float) -> None:
    with pytest.raises(BrokenRuleError) as refused:
        share_table(epsilon, 1, 3)
    assert refused.value.rule is Rule.POLICY


def test_noise_shares_depend_only_on_the_given_randomness() -> None:
    noise = Noise(epsilon=0.3, sensitivity=1, contributors=2)
    draws: list[Any] = [noise_share(noise, 5, random.Random(1).randbytes) for _ in range(2)]
    assert draws[0] == draws[1]
    assert draws[0] != noise_share(noise, 5, random.Random(2).randbytes)
