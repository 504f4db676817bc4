"""The sampler has the stated distribution, and its result depends only on the given random
bytes."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from potluck.privacy.host.discrete_gaussian import LARGEST_VARIANCE, DiscreteGaussian


def source(seed: int) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


@pytest.mark.parametrize("variance", [1, 2, 3, 8, 50])
def test_drawn_frequencies_follow_the_discrete_gaussian_distribution(variance: int) -> None:
    count = 200_000
    drawn = DiscreteGaussian(variance=variance).draw(count, source(variance))
    last = math.ceil(3.5 * math.sqrt(variance))
    places = np.arange(-last, last + 1)
    far = np.arange(-60 * last, 60 * last + 1)
    masses = np.exp(-(places**2) / (2 * variance)) / np.exp(-(far**2) / (2 * variance)).sum()
    expected = np.append(masses, 1 - masses.sum()) * count
    seen = [int((drawn == place).sum()) for place in places]
    found = stats.chisquare([*seen, count - sum(seen)], expected)
    assert found.pvalue > 1e-3


@pytest.mark.parametrize("variance", [10**6, 3 * 10**13, 2**60 + 1, LARGEST_VARIANCE])
def test_draws_of_large_variance_are_normally_distributed(variance: int) -> None:
    drawn = DiscreteGaussian(variance=variance).draw(100_000, source(1)) / math.sqrt(variance)
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert stats.skew(drawn) == pytest.approx(0, abs=0.04)
    assert drawn.var() == pytest.approx(1, rel=0.02)


def test_low_bits_of_large_draws_are_uniform() -> None:
    drawn = DiscreteGaussian(variance=2**60).draw(100_000, source(2))
    seen = np.bincount(drawn & 7, minlength=8)
    assert stats.chisquare(seen).pvalue > 1e-3


def test_same_random_bytes_give_the_same_draws() -> None:
    noise = DiscreteGaussian(variance=10**9)
    one, same = noise.draw(1000, source(3)), noise.draw(1000, source(3))
    assert (one == same).all()
    other = noise.draw(1000, os.urandom)
    assert (one != other).mean() > 0.9


@pytest.mark.parametrize(("further", "number"), [(b"\x00" * 8, 1), (b"\xff" * 8, 0)])
def test_comparison_tied_in_64_bits_reads_more_random_bytes(further: bytes, number: int) -> None:
    """All 64-bit words for k equal the threshold of k = 1, whose exact value is larger by 0.73."""
    tie = (6_786_177_901_268_885_274).to_bytes(8, "little")  # ⌊e^-1 · 2^64⌋

    def given(size: int) -> bytes:
        count = size // 24
        return bytes(8 * count) + tie * count + bytes(8 * count) if count else further

    assert set(DiscreteGaussian(variance=1).draw(100, given)) == {number}


@pytest.mark.parametrize("variance", [0, -1, LARGEST_VARIANCE + 1])
def test_variance_out_of_range_is_refused(variance: int) -> None:
    with pytest.raises(ValueError, match="not a valid variance"):
        DiscreteGaussian(variance=variance)
