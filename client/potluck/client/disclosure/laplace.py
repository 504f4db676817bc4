"""Discrete Laplace noise on counts, for histograms that clients send with differential privacy.

Noise X has P(X = x) ∝ exp(−|x| · ε / Δ₁), where Δ₁ is how much the counts can differ (L1) between
neighbouring data. Sampling is exact and uses only integers and fractions, since the low bits of a
floating-point Laplace sample disclose the true value (Mironov, CCS 2012). The method is Algorithm 2
of Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (NeurIPS 2020). Its
running time depends on the noise, so other parties must not be able to measure the time.

ε is the privacy loss of one release. Draw the noise once, store the result, and never draw again:
the average of T draws costs T · ε. Processing noisy counts afterwards (clipping, sums) is free.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, get_args

from potluck.common.errors import ConfigurationError

Adjacency = Literal["add-remove", "replace"]
"""The definition of neighbouring data: one sample added or removed, or one sample replaced. With
`replace`, the number of samples is public; with `add-remove`, it is also protected.
"""

Epsilon = Fraction | float
"""The privacy loss of a release, > 0; a float is read as its printed decimal number."""


def noisy_counts(
    counts: Sequence[int], *, epsilon: Epsilon, adjacency: Adjacency, randomness: random.Random
) -> list[int]:
    """Add independent discrete Laplace noise to each count; results may be negative.

    counts: numbers of samples in disjoint categories. All results together are ε-differentially
    private for single samples. `randomness` must be `secrets.SystemRandom()` for anything that
    leaves a client; a seeded generator is for tests. The noise has mean 0 and variance about
    2(Δ₁/ε)² per count.

    Raises ConfigurationError for an ε that is not a positive number, an unknown adjacency, or a
    negative count.
    """
    rate = exact_epsilon(epsilon) / sensitivity(adjacency)
    if any(count < 0 for count in counts):
        raise ConfigurationError("a label count is negative; all counts must be ≥ 0")
    return [count + discrete_laplace(rate, randomness) for count in counts]


def sensitivity(adjacency: Adjacency) -> int:
    """Return Δ₁, the largest L1 distance between the counts of neighbouring data.

    Raises ConfigurationError for an unknown adjacency.
    """
    if adjacency not in get_args(Adjacency):
        raise ConfigurationError(
            f"adjacency '{adjacency}' is unknown; choose one of: {', '.join(get_args(Adjacency))}",
            adjacency=adjacency,
        )
    return 1 if adjacency == "add-remove" else 2


def exact_epsilon(epsilon: Epsilon) -> Fraction:
    """Return ε as a fraction: 0.1 becomes 1/10, so that budgets add up without rounding.

    Raises ConfigurationError unless it is a positive number.
    """
    if not math.isfinite(epsilon) or epsilon <= 0:
        raise ConfigurationError(
            f"epsilon is {epsilon}; give a positive number, such as 0.5", epsilon=epsilon
        )
    return Fraction(repr(float(epsilon))) if isinstance(epsilon, float) else Fraction(epsilon)


def discrete_laplace(rate: Fraction, randomness: random.Random) -> int:
    """Draw an integer x with probability exactly tanh(rate / 2) · exp(−rate · |x|); rate > 0.

    Canonne, Kamath and Steinke, Algorithm 2, with t and s the rate's denominator and numerator.
    """
    numerator, denominator = rate.numerator, rate.denominator
    while True:
        remainder = randomness.randrange(denominator)
        if not _happens_exponentially(remainder, denominator, randomness):
            continue
        quotient = 0
        while _happens_exponentially(1, 1, randomness):
            quotient += 1
        magnitude = (remainder + denominator * quotient) // numerator
        negative = randomness.getrandbits(1)
        if not (negative and magnitude == 0):  # draw again: −0 would double P(0)
            return -magnitude if negative else magnitude


def _happens_exponentially(numerator: int, denominator: int, randomness: random.Random) -> bool:
    """Return True with probability exactly exp(−γ), γ = numerator / denominator in [0, 1].

    Counts successive events of probability γ/1, γ/2, γ/3 … until one does not happen (Canonne,
    Kamath and Steinke, Algorithm 1; after von Neumann and Forsythe).
    """
    trial = 1
    while randomness.randrange(denominator * trial) < numerator:
        trial += 1
    return trial % 2 == 1
