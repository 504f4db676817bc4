"""Adaptive clipping: the bound on updates follows a quantile of their norms (Andrew et al. 2021).

Each round counts the updates within the bound C, with noise, and sets C ← C · exp(-0.2 · (b - γ)).
b is the noisy share of updates within the bound, γ the quantile. Sum and count are two Gaussian
mechanisms on the same updates. With multipliers z₁ for the sum and z₂ for the count (whose
sensitivity is 1/2), they are together as private as one with 1/z² = 1/z₁² + 1/z₂². The ledger
charges z. The count takes the share `clip_quantile_share` of 1/z².
"""

from __future__ import annotations

import math

import numpy as np

from potluck.common.run_file.run_settings import PrivateUpdates
from potluck.privacy.coordinator.noised_sum import NoisedSum
from potluck.server.rounds.update_noise import adapted


def noise_of_sum(settings: PrivateUpdates, noise_multiplier: float) -> float:
    """Return the noise multiplier of the sum, with which sum and count have that of the run."""
    if settings.clip_quantile is None:
        return noise_multiplier
    return noise_multiplier / math.sqrt(1 - settings.clip_quantile_share)


def next_clip(total: NoisedSum, settings: PrivateUpdates, noise_multiplier: float) -> float:
    """Return the bound for the next round, by a noisy count of updates within this round's.

    noise_multiplier: the run's, for sum and count together.
    """
    deviation = noise_multiplier / (2 * math.sqrt(settings.clip_quantile_share))
    within = np.where(total.norms <= total.clip, 0.5, -0.5).sum()
    noisy = 0.5 + (float(within) + deviation * float(total.normals(1)[0])) / total.clients
    return adapted(total.clip, noisy, settings)
