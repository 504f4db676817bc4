"""NeuralUCB (Zhou, Li and Gu 2020), adapted to the selection of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.linalg import cholesky, solve_triangular

from potluck.server.selection import Floats, Rows
from potluck.server.selectors.bandits.context_bandit import ContextBandit, Lesson
from potluck.server.selectors.parts.flash_memory import FEATURES
from potluck.server.selectors.parts.parallel import passes
from potluck.server.state import State

_SEED = 0
_MOST = 10_000
"""Maximum number of rewards on which the network is trained; the latest ones are used."""
_PATTERN_BITS, _PATTERNS = 64, 256
"""Maximum number of hidden units for which the sets of active units are distinguished, and number
of such sets that are processed at once."""
_FIRST, _SECOND, _EPSILON = 0.9, 0.999, 1e-8


@dataclass(frozen=True, kw_only=True)
class NeuralBandit(ContextBandit):
    """Selects the clients for which a small network predicts the largest loss change.

    The score is the prediction plus ν √(gᵀ Z⁻¹ g / width). g: the network's gradient at the
    context. Z = λ I + Σ g gᵀ / width, summed over all rewarded contexts. width: size of the
    network's hidden layer. exploration: ν. regularization: λ. steps, learning_rate: settings of
    Adam, which trains on the latest 10,000 rewards in each round. O(K · width²).
    """

    width: Annotated[int, Field(ge=1, le=256)] = 32
    exploration: Annotated[float, Field(ge=0, le=100)] = 0.1
    regularization: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    steps: Annotated[int, Field(ge=0, le=1000)] = 50
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 0.01

    def beginning(self) -> State:
        """Return the state with a randomly initialised network, which is the same in every run."""
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
        """Add the rewards to the design matrix and the history, and train the network further."""
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
        """Return the predicted reward and the exploration bonus of each row, computed in blocks."""
        weights, root = known.arrays["weights"], design_root(known.arrays["design"])
        expected, unknown = uncertain(weights, contexts[rows], root)
        return expected, self.exploration * unknown / np.sqrt(self.width)

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


def uncertain(weights: Floats, contexts: Floats, root: Floats) -> tuple[Floats, Floats]:
    """Return the network's predictions for n contexts, and √(gᵀ Z⁻¹ g) for its gradients g.

    For one set of active hidden units, g is linear in the context: g = G x̃, x̃ = (x, 1). If few
    such sets occur, Gᵀ Z⁻¹ G (5 × 5) is computed once for each set.
    """
    layers = Layers.of(weights, contexts.shape[1])
    expected, active = np.empty(len(contexts)), np.empty(len(contexts), dtype=np.uint64)
    few = len(layers.shift) <= _PATTERN_BITS

    def look(start: int, stop: int) -> None:
        hidden = contexts[start:stop] @ layers.inner.T + layers.shift
        if few:
            active[start:stop] = _packed(hidden > 0)
        expected[start:stop] = np.maximum(hidden, 0.0) @ layers.outer + weights[-1]

    with passes(len(contexts)) as run:
        run(look)
    patterns, which = np.unique(active, return_inverse=True) if few else (active, active)
    found = np.empty(len(contexts))
    if not few or len(patterns) * (contexts.shape[1] + 1) >= len(contexts):

        def directly(start: int, stop: int) -> None:
            _, slopes = network(weights, contexts[start:stop])
            found[start:stop] = widths(slopes, root)

        with passes(len(contexts)) as run:
            run(directly)
        return expected, found
    forms = _quadratic_forms(layers, patterns, root)

    def by_pattern(start: int, stop: int) -> None:
        ones = np.ones((stop - start, 1))
        extended = np.concatenate([contexts[start:stop], ones], axis=1)
        squares = np.einsum("ni,nij,nj->n", extended, forms[which[start:stop]], extended)
        found[start:stop] = np.sqrt(np.maximum(squares, 0.0))

    with passes(len(contexts)) as run:
        run(by_pattern)
    return expected, found


def _packed(active: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Pack each row of up to 64 booleans into an integer."""
    bits = np.zeros((len(active), _PATTERN_BITS), dtype=np.bool_)
    bits[:, : active.shape[1]] = active
    packed: NDArray[np.uint64] = np.packbits(bits, axis=1, bitorder="little").view("<u8")[:, 0]
    return packed


def _quadratic_forms(layers: Layers, patterns: NDArray[np.uint64], root: Floats) -> Floats:
    """Return Gᵀ Z⁻¹ G for each set of active hidden units: sets × d × d, d = 1 + the context's
    size; see `uncertain`. root: L of Z = L Lᵀ."""
    width, size = layers.inner.shape
    extended = np.concatenate([layers.inner, layers.shift[:, None]], axis=1)
    diagonal = np.arange(size)
    forms = np.empty((len(patterns), size + 1, size + 1))
    for start in range(0, len(patterns), _PATTERNS):
        block = patterns[start : start + _PATTERNS]
        bits = (block[:, None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1)
        outer = bits * layers.outer
        maps = np.zeros((len(block), len(root), size + 1))
        by_unit = maps[:, : size * width].reshape(len(block), width, size, size + 1)
        by_unit[:, :, diagonal, diagonal] = outer[:, :, None]
        maps[:, size * width :][:, :width, size] = outer
        maps[:, -width - 1 : -1] = bits[:, :, None] * extended
        maps[:, -1, size] = 1.0
        columns = maps.transpose(1, 0, 2).reshape(len(root), -1)
        solved = solve_triangular(root, columns, lower=True, check_finite=False)
        parts = solved.reshape(len(root), len(block), size + 1)
        forms[start : start + _PATTERNS] = np.einsum("pni,pnj->nij", parts, parts, optimize=True)
    return forms


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Weights of a network: W₁, width × size; b₁ and w₂, width."""

    inner: Floats
    shift: Floats
    outer: Floats

    @classmethod
    def of(cls, weights: Floats, size: int) -> Layers:
        """Return views of a flat array of all weights."""
        width = (len(weights) - 1) // (size + 2)
        return cls(
            inner=weights[: size * width].reshape(width, size),
            shift=weights[size * width :][:width],
            outer=weights[-width - 1 : -1],
        )


def network(weights: Floats, contexts: Floats) -> tuple[Floats, Floats]:
    """Return w₂ · relu(W₁ x + b₁) + b₂ for n contexts, and its gradients with respect to all
    weights, n × P."""
    layers = Layers.of(weights, contexts.shape[1])
    hidden = contexts @ layers.inner.T + layers.shift
    active = np.where(hidden > 0, layers.outer, 0.0)
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
    return hidden @ layers.outer + weights[-1], slopes


def design_root(design: Floats) -> Floats:
    """Return the Cholesky factor L of Z = L Lᵀ; a small term added to the diagonal absorbs rounding
    errors. design: Z."""
    slack = len(design) * np.finfo(np.float64).eps * np.trace(design)
    root: Floats = cholesky(design + slack * np.eye(len(design)), lower=True)
    return root


def widths(slopes: Floats, root: Floats) -> Floats:
    """Return √(gᵀ Z⁻¹ g) for each row g of `slopes`. root: L of Z = L Lᵀ."""
    found: Floats = np.sqrt((solve_triangular(root, slopes.T, lower=True) ** 2).sum(axis=0))
    return found
