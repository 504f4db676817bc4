"""A selector with weights that even out known interaction matrices (FedDiverse §5.7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from potluck.server.selection import Floats, Selection, SelectionContext, Selector, Signal
from potluck.server.selectors.parts.choosing import Cohort, disclosed, profiles
from potluck.server.state import State

# Weights of minimum variance ----------------------------------------------------------------------
# Minimises Var(Σ ω_k N_k) + ridge · ‖ω‖² over ω ≥ 0, Σω = 1. The ridge makes the result unique, and
# gives clients with equal matrices equal weights.
#
# B has the centred vectors N_k as columns, divided by the square root of n, their number of
# elements. Then the variance is ‖Bω‖², and the optimum is ω = (μ − Bᵀy)₊, for a vector y of n
# elements and a number μ. These minimise φ(y, μ) = ridge/2 ‖y‖² + ½ ‖(μ − Bᵀy)₊‖² − μ, which is
# convex and piecewise quadratic, so Newton's method ends after a few steps. If there are many
# clients, the search starts with a few of them. It then adds the clients to which the solution
# would give a positive weight, until no such client is left.

RIDGE = 1e-6
_STEPS = 200
_CONVERGED = 1e-14
_SHORTEST = 1e-12
_SUFFICIENT = 1e-4
"""Share of the predicted decrease that a step must achieve (Armijo)."""
_FEW = 512


def minimum_variance_weights(vectors: Floats, *, ridge: float = RIDGE) -> Floats:
    """Return the weights (K, ≥ 0, sum 1) that make the entries of the weighted sum most even.

    vectors: K × entries. Clients that the optimum does not use have a weight of exactly 0.
    """
    clients, entries = vectors.shape
    working = np.arange(0, clients, max(clients // _FEW, 1))
    scale = float(np.abs(vectors[working]).max()) or 1.0
    point = np.zeros(entries + 1)
    point[-1] = 1 / len(working)
    while True:
        problem = _Dual(_rows(vectors, working), scale, ridge)
        point = problem.minimum(point)
        weights = _Dual(vectors, scale, ridge).weights(point)
        outside = weights > 0
        outside[working] = False
        joining = np.flatnonzero(outside)
        if not len(joining):
            weights /= weights.sum()
            return weights
        if len(joining) + len(working) > clients // 4:
            joining = np.setdiff1d(np.arange(clients), working, assume_unique=True)
        elif len(joining) > _FEW:
            joining = joining[np.argpartition(-weights[joining], _FEW)[:_FEW]]
        point *= len(working) / (len(working) + len(joining))
        working = np.sort(np.concatenate([working, joining]))


def _rows(vectors: Floats, rows: NDArray[np.int64]) -> Floats:
    return vectors if len(rows) == len(vectors) else vectors[rows]


class _Dual:
    """The function φ (see the comment above) and its minimum. A point is an array with y and μ.

    The vectors are not centred: centring y has the same effect.
    """

    def __init__(self, vectors: Floats, scale: float, ridge: float) -> None:
        self._vectors = vectors
        self._factor = 1 / (scale * np.sqrt(vectors.shape[1]))
        self._ridge = ridge / scale**2

    def minimum(self, point: Floats) -> Floats:
        """Return the point at which φ is least; the search starts at `point`."""
        weights = self.weights(point)
        value = self._value(point, weights)
        for _ in range(_STEPS):
            step, slope = self._newton(point, weights)
            if -slope <= _CONVERGED * abs(value):
                break
            active = weights > 0
            length = 1.0
            while True:
                trial = point + length * step
                weights = self.weights(trial)
                trial_value = self._value(trial, weights)
                if trial_value <= value + _SUFFICIENT * length * slope or length < _SHORTEST:
                    break
                length /= 2
            point, value = trial, trial_value
            if length == 1.0 and np.array_equal(active, weights > 0):
                break  # the step stays in one quadratic piece: its minimum is that of φ
        return point

    def weights(self, point: Floats) -> Floats:
        """Return the clients' weights at a point, (μ − Bᵀy)₊."""
        weights: Floats = self._vectors @ (self._factor * (point[:-1].mean() - point[:-1]))
        weights += point[-1]
        return weights.clip(min=0.0, out=weights)

    def _value(self, point: Floats, weights: Floats) -> float:
        square = float(point[:-1] @ point[:-1])
        return self._ridge * square / 2 + float(weights @ weights) / 2 - float(point[-1])

    def _newton(self, point: Floats, weights: Floats) -> tuple[Floats, float]:
        """Return the step to the minimum of the quadratic piece around a point, and the slope of φ
        along this step."""
        active = np.flatnonzero(weights)
        vectors = _rows(self._vectors, active)
        entries = self._vectors.shape[1]
        centre = self._factor * (np.eye(entries) - 1 / entries)
        gradient = np.empty(entries + 1)
        gradient[:-1] = self._ridge * point[:-1] - centre @ (weights[active] @ vectors)
        gradient[-1] = weights.sum() - 1
        hessian = np.empty((entries + 1, entries + 1))
        hessian[:-1, :-1] = centre @ (vectors.T @ vectors) @ centre + self._ridge * np.eye(entries)
        hessian[:-1, -1] = hessian[-1, :-1] = -centre @ vectors.sum(axis=0)
        hessian[-1, -1] = len(active)
        step: Floats
        try:
            step = np.linalg.solve(hessian, -gradient).astype(np.float64)
        except np.linalg.LinAlgError:  # no active client, or an ill-conditioned matrix
            step = np.linalg.lstsq(hessian, -gradient, rcond=1e-15)[0].astype(np.float64)
        return step, float(gradient @ step)


# The selector -------------------------------------------------------------------------------------


class KnownMatrix(Selector):
    """Draws clients by weights that make classes and attributes as even as possible.

    With these weights, the sum of the clients' matrices is as even as possible. The weights are
    computed again for the available clients of each round. Often few clients have a weight above 0.
    These are drawn first, the rest of the cohort uniformly; the reasons include the number of
    clients with a weight. Clients without a matrix can only be drawn uniformly. O(K · classes²).
    """

    needs_profiles = frozenset({Signal.INTERACTION_MATRIX})

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Draw `count` clients without replacement, by weight."""
        generator = context.generator("known-matrix")
        cohort = Cohort(context, generator)
        matrices = context.population.interaction_matrices
        rows = disclosed(matrices, context.available)
        if matrices is not None and len(rows):
            weights = minimum_variance_weights(profiles(matrices, rows).reshape(len(rows), -1))
            support = np.flatnonzero(weights > 0)
            # Exponential variables, with the weights as rates, are in the order of successive
            # weighted draws.
            arrivals = generator.exponential(size=len(support)) / weights[support]
            size = min(cohort.missing, len(support))
            first = np.argpartition(arrivals, size - 1)[:size] if size else support[:0]
            drawn = support[first[np.argsort(arrivals[first])]]
            reasons = [f"weight {weight:.3g}, one of {len(support)}" for weight in weights[drawn]]
            cohort.extend(rows[drawn].tolist(), reasons)
        cohort.draw(cohort.missing, "no weight; drawn uniformly")
        return cohort.selection()
