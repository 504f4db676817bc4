"""An adaptation of NeuralUCB (Zhou, Li and Gu 2020) to clients (ALGORITHMS §1.16)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field
from scipy.linalg import cholesky, solve_triangular

from potluck.server.selection import Floats, Rows
from potluck.server.selectors.bandits.context_bandit import ContextBandit, Lesson
from potluck.server.selectors.parts.flash_memory import FEATURES
from potluck.server.selectors.parts.parallel import passes
from potluck.server.state import State

_SEED = 0
_MOST = 10_000
"""Rewards that the network is trained on, the latest."""
_FIRST, _SECOND, _EPSILON = 0.9, 0.999, 1e-8


@dataclass(frozen=True, kw_only=True)
class NeuralBandit(ContextBandit):
    """Adapted: the reward that a small network expects of a context, plus ν √(gᵀ Z⁻¹ g / width).

    g: the network's gradient at the context, Z = λ I + Σ g gᵀ / width over all rewarded contexts.
    width: of its one hidden layer. exploration: ν. regularization: λ. steps, learning_rate: of Adam
    on the latest 10,000 rewards, in each round. O(K · width²).
    """

    width: Annotated[int, Field(ge=1, le=256)] = 32
    exploration: Annotated[float, Field(ge=0, le=100)] = 0.1
    regularization: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    steps: Annotated[int, Field(ge=0, le=1000)] = 50
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 0.01

    def beginning(self) -> State:
        """A random network, the same in every run."""
        size = len(FEATURES)
        generator = np.random.Generator(np.random.PCG64(_SEED))
        weights = np.concatenate(
            [
                generator.standard_normal(size * self.width) * np.sqrt(2 / size),
                np.zeros(self.width),
                generator.standard_normal(self.width) / np.sqrt(self.width),
                np.zeros(1),
            ]
        )
        return State(
            arrays={
                "weights": weights,
                "design": self.regularization * np.eye(len(weights)),
                "rewarded": np.zeros((0, size)),
                "brought": np.zeros(0),
            }
        )

    def learned(self, known: State, lesson: Lesson, clients: int) -> State:
        """With the rewards in the design and the history, and the network trained on."""
        arrays = known.arrays
        if not len(lesson.rows):
            return known
        _, slopes = network(arrays["weights"], lesson.contexts)
        contexts = np.concatenate([arrays["rewarded"], lesson.contexts])[-_MOST:]
        rewards = np.append(arrays["brought"], lesson.rewards)[-_MOST:]
        return State(
            arrays={
                "weights": self._trained(arrays["weights"], contexts, rewards),
                "design": arrays["design"] + slopes.T @ slopes / self.width,
                "rewarded": contexts,
                "brought": rewards,
            }
        )

    def scores(
        self, known: State, contexts: Floats, rows: Rows, number: int
    ) -> tuple[Floats, Floats]:
        """Of each context by the network, in blocks."""
        expected, bonus = np.zeros(len(rows)), np.zeros(len(rows))
        root = design_root(known.arrays["design"])

        def score(start: int, stop: int) -> None:
            found, slopes = network(known.arrays["weights"], contexts[rows[start:stop]])
            expected[start:stop] = found
            bonus[start:stop] = self.exploration * widths(slopes, root) / np.sqrt(self.width)

        with passes(len(rows)) as run:
            run(score)
        return expected, bonus

    def _trained(self, weights: Floats, contexts: Floats, rewards: Floats) -> Floats:
        first, second = np.zeros_like(weights), np.zeros_like(weights)
        for step in range(1, self.steps + 1):
            found, slopes = network(weights, contexts)
            gradient = (found - rewards) @ slopes / len(rewards)
            first = _FIRST * first + (1 - _FIRST) * gradient
            second = _SECOND * second + (1 - _SECOND) * gradient**2
            rate = self.learning_rate * np.sqrt(1 - _SECOND**step) / (1 - _FIRST**step)
            weights = weights - rate * first / (np.sqrt(second) + _EPSILON)
        return weights


def network(weights: Floats, contexts: Floats) -> tuple[Floats, Floats]:
    """w₂ · relu(W₁ x + b₁) + b₂ of n contexts, and its gradients by all weights, n × P."""
    size = contexts.shape[1]
    width = (len(weights) - 1) // (size + 2)
    inner = weights[: size * width].reshape(width, size)
    shift, outer = weights[size * width :][:width], weights[-width - 1 : -1]
    hidden = contexts @ inner.T + shift
    active = np.where(hidden > 0, outer, 0.0)
    hidden = np.maximum(hidden, 0.0)
    slopes = np.concatenate(
        [
            (active[:, :, None] * contexts[:, None, :]).reshape(len(contexts), -1),
            active,
            hidden,
            np.ones((len(contexts), 1)),
        ],
        axis=1,
    )
    return hidden @ outer + weights[-1], slopes


def design_root(design: Floats) -> Floats:
    """L of Z = L Lᵀ, with a little slack against rounding."""
    slack = len(design) * np.finfo(np.float64).eps * np.trace(design)
    root: Floats = cholesky(design + slack * np.eye(len(design)), lower=True)
    return root


def widths(slopes: Floats, root: Floats) -> Floats:
    """√(gᵀ Z⁻¹ g) of each row g; root: L of Z = L Lᵀ."""
    found: Floats = np.sqrt((solve_triangular(root, slopes.T, lower=True) ** 2).sum(axis=0))
    return found
