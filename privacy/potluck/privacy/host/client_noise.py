"""Noise that hides a client's whole update in a masked sum, made by the clients together.

Each client scales its update down to the L2 norm C (`clip`), multiplies it by S (`SumGrid.scale`)
and rounds it to whole numbers. Before masking it adds a share of noise: for each parameter a
discrete Gaussian number with variance v = ⌈(σ C S)² / m⌉. m clients (`SumGrid.contributors`) are
certain to be in every sum and to keep their shares secret, so a sum has noise of variance at least
(σ C S)². More clients only add noise.

The noise hides one client's vector, compared with zeros. Its length is at most C S + √d / 2 for d
parameters, since rounding moves each by at most 1/2. A discrete Gaussian has at most the Rényi
divergence of a Gaussian (Canonne, Kamath & Steinke 2020), so one upload is a Gaussian event with
noise multiplier σ' = σ C S / (C S + √d / 2). The sum of m shares is not exactly a discrete
Gaussian: the log-ratio of both probabilities is at most 10 m exp(-π² s²) for each parameter, with
s² = v (Kairouz, Liu & Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning
with Secure Aggregation", ICML 2021). With `LEAST_DEVIATION` that is less than 2^-1000000.

For adaptive clipping (Andrew et al. 2021) one more number counts the updates within the clip: ±κ
with κ = C √(q / (1 - q)), for a share q of the privacy loss. The vector of d + 1 numbers has an L2
norm of at most C / √(1 - q), which replaces C in the formulas above.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from potluck.client.private_training import SumGrid, UpdateNoise
from potluck.common.errors import ConfigurationError
from potluck.privacy.host.discrete_gaussian import LARGEST_VARIANCE, DiscreteGaussian, Random
from potluck.privacy.planned_training import LARGEST_ROUNDING

LEAST_DEVIATION: Final = 2**10
"""Minimum standard deviation of a share, in whole numbers."""
TAIL_DEVIATIONS: Final = 12
"""Number of standard deviations of noise for which a sum has room; exceeded with a probability of
at most 2^-102."""
_SHRUNK: Final = 1 - 2.0**-20
"""Factor on the clip: leaves room for the rounding of floating-point numbers."""
_BLOCK: Final = 2**18


def share_variance(noise_multiplier: float, clip: float, grid: SumGrid) -> int:
    """Return the variance v of one client's share, in whole numbers."""
    deviation = Fraction(noise_multiplier) * Fraction(clip) * Fraction(grid.scale)
    return math.ceil(deviation * deviation / grid.contributors)


def noise_on_grid(noise_multiplier: float, clip: float, grid: SumGrid) -> float:
    """Return the noise multiplier σ' of an upload; rounding makes it a little smaller than σ."""
    return noise_multiplier / (1 + _rounding(clip, grid)) * _SHRUNK


def check_grid(noise_multiplier: float, clip: float, grid: SumGrid) -> None:
    """Raise ConfigurationError if sums on the grid could overflow, or the grid is too coarse."""
    variance = share_variance(noise_multiplier, clip, grid)
    longest = grid.clients * (grid.scale * clip + 1)
    most = longest + TAIL_DEVIATIONS * math.sqrt(grid.clients * variance)
    if most > grid.largest:
        raise ConfigurationError(
            f"a sum of {grid.clients} updates with noise could overflow: it may reach {most:.3g}, "
            f"and the limit is {grid.largest:.3g}; run the same version of Potluck on the "
            "coordinator and this host"
        )
    rounding, deviation = _rounding(clip, grid), math.sqrt(variance)
    coarse = rounding > LARGEST_ROUNDING or deviation < LEAST_DEVIATION
    if coarse or variance > LARGEST_VARIANCE:
        raise ConfigurationError(
            f"masked updates are too coarse for their noise: with {grid.values} parameters, each "
            f"client's share of the noise has a standard deviation of {deviation:.3g}; choose "
            "masking.bits = 64, fewer clients_per_round, or a smaller model"
        )


def _rounding(clip: float, grid: SumGrid) -> float:
    return math.sqrt(grid.values) / (2 * clip * grid.scale)


def keystream() -> Random:
    """Return a source of random bytes: AES-256 in counter mode, with a key from `os.urandom`.

    Three times as fast as `os.urandom` itself. The masks of the upload rest on the same cipher.
    """
    stream = Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
    return lambda count: stream.update(bytes(count))


class ClientNoise(UpdateNoise):
    """The noise of one upload."""

    def __init__(
        self,
        *,
        clip: float,
        noise_multiplier: float,
        charge: Callable[[float], None],
        counted_share: float = 0.0,
        random: Random | None = None,
    ) -> None:
        """clip: C. noise_multiplier: σ. charge: charges the ledger for an upload with noise
        multiplier σ'; raises what `UpdateNoise.charge` raises. counted_share: q, in [0, 1). random:
        source of the noise; None for a `keystream` of each charge's own."""
        self._clip, self._noise_multiplier = clip, noise_multiplier
        self._charge, self._random = charge, random
        self.counts = counted_share > 0
        self._longest = clip / math.sqrt(1 - counted_share)
        self._counted = clip * math.sqrt(counted_share / (1 - counted_share)) * _SHRUNK

    def bound(self, update: NDArray[np.float32]) -> float | None:
        """Scale an update down, in place, to the clip. Return ±κ; None if a number isn't finite."""
        norm = math.sqrt(sum(_squared(each) for each in _blocks(update)))
        if not math.isfinite(norm):
            return None
        within = norm <= self._clip
        longest = self._clip * _SHRUNK
        if norm > longest:
            factor = np.float64(longest / norm)
            for each in _blocks(update):
                np.multiply(each, factor, out=each, casting="same_kind")
        return self._counted if within else -self._counted

    def charge(self, grid: SumGrid) -> Callable[[int], NDArray[np.int64]]:
        """Charge the client's ledger for one upload; return a function that draws the noise."""
        check_grid(self._noise_multiplier, self._longest, grid)
        self._charge(noise_on_grid(self._noise_multiplier, self._longest, grid))
        variance = share_variance(self._noise_multiplier, self._longest, grid)
        random = self._random or keystream()
        return partial(DiscreteGaussian(variance=variance).draw, random=random)


def _blocks(vector: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    return [vector[begin : begin + _BLOCK] for begin in range(0, vector.size, _BLOCK)]


def _squared(block: NDArray[np.float32]) -> float:
    values = block.astype(np.float64)
    return float(values @ values)
