"""Noise on answers to questions.

Answers are means over a client's records; noise hides each record.

The sums are rounded to a grid, so that floating-point rounding reveals nothing, and get discrete
Gaussian noise. One record changes a vector of d sums by at most the sensitivity S (L2 norm). With
2^20 · √d grid steps in S, the rounded vectors of neighbouring data differ by at most
2^20 · √d + √d steps: the rounding of two numbers changes their difference by at most 1. The noise
is scaled to this difference. A discrete Gaussian has at most the Rényi divergence of a Gaussian
with the same noise multiplier (Canonne, Kamath & Steinke 2020), so one answer is a Gaussian event.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from potluck.client.question import BoundedSums
from potluck.privacy.host.discrete_gaussian import DiscreteGaussian, Random

_STEPS: Final = 2**20
"""Number of grid steps in the sensitivity, to be multiplied by √d for d sums."""


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """Sums as numbers of grid steps. grid: size of a step, > 0. counts: see `rounded`."""

    steps: tuple[int, ...]
    grid: float
    names: tuple[str, ...]
    counts: bool

    @property
    def squared_sensitivity(self) -> int:
        """Square of the maximum change of `steps` by one record (L2 norm)."""
        return len(self.steps) * (_STEPS + 1) ** 2


def rounded(sums: BoundedSums, samples: int, *, public: bool) -> Rounded:
    """Return the sums on a grid. The last one is the number of samples, unless it is public.

    The number of samples is scaled so that its sensitivity equals that of the sums. So the whole
    vector has √2 times that sensitivity.
    """
    names = tuple(sorted(sums.values))
    values = [sums.values[name] for name in names]
    if not public:
        values.append(samples * sums.sensitivity)
    whole = sums.sensitivity if public else sums.sensitivity * math.sqrt(2)
    grid = whole / (_STEPS * math.sqrt(len(values)))
    steps = tuple(round(value / grid) for value in values)
    return Rounded(steps=steps, grid=grid, names=names, counts=not public)


def noisy_means(
    sums: BoundedSums, samples: int, *, public: bool, noise_multiplier: float, random: Random
) -> Mapping[str, float]:
    """Return noisy means over a client's records, from the sums, and the public numbers.

    samples: number of samples, ≥ 1. public: whether the number of samples may be disclosed;
    otherwise it gets noise too. noise_multiplier: > 0, in units of the sensitivity. Means are
    clipped to [0, sensitivity].
    """
    found = rounded(sums, samples, public=public)
    variance = Fraction(noise_multiplier) ** 2 * found.squared_sensitivity
    drawn = DiscreteGaussian(variance=math.ceil(variance)).draw(len(found.steps), random)
    noisy = [(step + int(each)) * found.grid for step, each in zip(found.steps, drawn, strict=True)]
    count = max(1.0, noisy[-1] / sums.sensitivity) if found.counts else float(samples)
    means = {
        name: min(max(value / count, 0.0), sums.sensitivity)
        for name, value in zip(found.names, noisy, strict=False)
    }
    return {**means, **sums.public}
