"""The normaliser a_k of FedNova: the weight of a client's local steps.

Wang et al. 2020 ("Tackling the Objective Inconsistency Problem", §4.1) write a client's weight
delta as η·Σ a_i·g_i over its gradients; a_k is Σ a_i. So a_k is the distance that the optimiser
would move for a constant gradient of 1 and a learning rate of 1. This definition is used here for
every combination of optimiser settings.
"""

from __future__ import annotations

from typing import Final

from potluck.common.settings.local_training import LocalTraining

LEAST_NORMALIZER: Final = 0.1
"""Minimum of a_k.

A client with a smaller a_k would outweigh all other clients; no sensible training has so small a
value.
"""


def normalizer(training: LocalTraining, steps: int, *, round_number: int, mu: float = 0.0) -> float:
    """Return a_k after `steps` ≥ 1 steps.

    SGD: the number of steps τ; with momentum ρ (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ); with a proximal
    term a ← (1 − ημ)·a + 1 for each step, η the round's learning rate; with both, both are applied.
    Adam and AdamW rescale every gradient, so a_k is not defined for them: τ is used instead. Weight
    decay is ignored.
    """
    if training.adaptive:
        return float(steps)
    pull = training.learning_rate_in(round_number) * mu
    distance = speed = 0.0
    for _ in range(steps):
        speed = training.momentum * speed + 1.0 - pull * distance
        distance += speed
    return distance


def largest_normalizer(training: LocalTraining, steps: int) -> float:
    """Return an upper bound of a_k after `steps` steps, for any proximal term."""
    momentum = 0.0 if training.adaptive else training.momentum
    return max(1, steps) / (1.0 - momentum) * (1.0 + 1e-9)
