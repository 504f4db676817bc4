"""Linear Thompson sampling (Agrawal and Goyal 2013, as in FLASH Alg. 1).

A reward is modelled as linear in a context of d numbers. The posterior of the d coefficients is
stored as a precision matrix and a response vector. Each round uses coefficients drawn from the
posterior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular

from potluck.server.selection import Floats


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Posterior of the coefficients. precision: d × d, V = λI + Σ x xᵀ. response: d, b = Σ r x."""

    precision: Floats
    response: Floats

    @classmethod
    def prior(cls, dimension: int, regularization: float) -> Posterior:
        """Return the posterior before any reward. regularization: λ > 0."""
        return cls(precision=regularization * np.eye(dimension), response=np.zeros(dimension))

    def given(self, contexts: Floats, rewards: Floats) -> Posterior:
        """Return the posterior after n more rewards. contexts: n × d, finite. rewards: n,
        finite."""
        return Posterior(
            precision=self.precision + contexts.T @ contexts,
            response=self.response + rewards @ contexts,
        )

    def estimate(self) -> Floats:
        """Return the estimated coefficients V⁻¹ b."""
        estimate: Floats = cho_solve((self._root(), True), self.response)
        return estimate

    def sample(self, width: float, normal: Floats) -> Floats:
        """Return coefficients drawn from N(estimate, width² V⁻¹). normal: d standard normal
        numbers.

        V = L Lᵀ is factored, never inverted: the offset is width · L⁻ᵀ normal.
        """
        offset: Floats = solve_triangular(self._root(), normal, lower=True, trans=1)
        return self.estimate() + width * offset

    def _root(self) -> Floats:
        # Contexts in raw units make V so ill-conditioned that rounding could turn it indefinite.
        dimension = len(self.precision)
        slack = dimension * np.finfo(np.float64).eps * np.trace(self.precision)
        root: Floats = cholesky(self.precision + slack * np.eye(dimension), lower=True)
        return root


def exploration_width(
    round_number: int, clients: int, *, dimension: int, regularization: float, delta: float
) -> float:
    """Return γ_t = √λ + √(d ln((1 + t·m) / δ)). round_number: t, from 0. clients: m."""
    return math.sqrt(regularization) + math.sqrt(
        dimension * math.log((1 + round_number * clients) / delta)
    )
