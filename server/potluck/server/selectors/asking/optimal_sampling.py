"""Optimal client sampling: the probabilities with the least variance for a cohort of a given size.

Chen, Horváth and Richtárik, "Optimal Client Sampling for Federated Learning", TMLR 2022. Its
approximation follows the authors' program.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from potluck.server.selection import (
    Answers,
    Ask,
    Floats,
    Rows,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.selectors.parts.choosing import Cohort, all_samples
from potluck.server.selectors.parts.reported import column, plausible
from potluck.server.state import State

_KIND = "gradient-norm"
_FACTOR = 100.0
"""Maximum plausible gradient norm, as a multiple of the clients' median; larger norms are limited
to it."""
_SURE = 1 - 1e-12
"""Clients with at least this probability are drawn for certain."""


@dataclass(frozen=True, kw_only=True)
class OptimalSampling(Selector):
    """Draws clients with large gradients more often, and weights them less.

    Asks candidates, drawn uniformly, for ‖g_k‖, the norm of the gradient of their mean loss at the
    round's model. Client k is in the cohort with probability p_k ≤ 1, so that Σ_k (n_k ‖g_k‖)² /
    p_k is least and Σ p_k = count. n_k: samples.

    candidates: number of clients asked, at least the cohort's size; 0 for all available ones. rule:
    `exact` computes p from sorted norms. `approximate` scales p ∝ n_k ‖g_k‖ up in `steps` steps, as
    clients that send only sums do; Σ p_k may then be smaller than count, and so may the cohort.
    weights: weights of the updates. `inverse` weights by n_k / p_k; numbers of samples that are not
    known yet are replaced by the mean. `samples` is for strategies and sums that accept no weights
    from a selector.

    The cohort has a fixed size: it is drawn systematically from shuffled candidates. The paper
    draws each client independently, with the same p. Candidates that report no norm come last, and
    weigh n_k. O(K + candidates · log candidates).
    """

    candidates: NonNegativeInt = 32
    rule: Literal["exact", "approximate"] = "exact"
    steps: PositiveInt = 4
    weights: Literal["inverse", "samples"] = "inverse"

    asks_questions = frozenset({_KIND})

    def __post_init__(self) -> None:
        # the dataclass is frozen
        object.__setattr__(self, "sets_weights", self.weights == "inverse")

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """Return the cohort, with the largest gradients first."""
        generator = context.generator("ocs")
        cohort = Cohort(context, generator)
        if not cohort.size:
            return self._weighted(cohort, np.zeros(0), {})
        asked = self._drawn(context, generator)
        answers = yield Ask(rows=asked, kind=_KIND)
        norms = plausible(column(answers, _KIND, len(context.population)), factor=_FACTOR)[asked]
        told = ~np.isnan(norms)
        known, norms = asked[told], norms[told]
        samples = all_samples(context.population)
        sizes = samples[known]
        size = min(cohort.size, len(known))
        importance = sizes * norms
        if self.rule == "exact":
            chances = optimal(importance, size)
        else:
            chances = approximate(importance, size, self.steps)
        drawn = systematic(chances, generator)
        drawn = drawn[np.argsort(-norms[drawn], kind="stable")][:size]
        cohort.extend(
            known[drawn].tolist(),
            [
                f"gradient {norm:.3g}: probability {chance:.3g}"
                for norm, chance in zip(norms[drawn], chances[drawn], strict=True)
            ],
        )
        if self.rule == "exact" or len(known) < cohort.size:
            others = context.available if len(known) < cohort.size else known
            cohort.draw(cohort.missing, "gave no gradient norm; drawn uniformly", others)
        return self._weighted(cohort, samples, dict(zip(known.tolist(), chances, strict=True)))

    def _drawn(self, context: SelectionContext, generator: np.random.Generator) -> Rows:
        """Draw the candidates; return them sorted."""
        available = context.available
        wanted = max(self.candidates or len(available), context.count)
        if wanted >= len(available):
            return available
        return np.sort(generator.choice(available, size=wanted, replace=False))

    def _weighted(self, cohort: Cohort, samples: Floats, chances: dict[int, float]) -> Selection:
        """Return the cohort with its weights. samples: number of samples of each client (K)."""
        selection = cohort.selection()
        if not self.sets_weights:
            return selection
        drawn = np.array([chances.get(row, 1.0) for row in cohort.rows])
        return replace(selection, weights=samples[selection.rows] / np.where(drawn > 0, drawn, 1.0))


def optimal(importance: Floats, size: int) -> Floats:
    """Return the p with Σp = size, 0 ≤ p ≤ 1, that makes Σ importance² / p least (paper, Eq. 7).

    importance: ≥ 0, finite. size: at most its length. If at most `size` values are above 0, these
    get p = 1, and the other positions share the rest of Σp equally.
    """
    count = len(importance)
    chances = np.ones(count)
    if size >= count:
        return chances
    positive = importance > 0
    if np.count_nonzero(positive) <= size:
        left = size - np.count_nonzero(positive)
        chances[~positive] = left / (count - np.count_nonzero(positive))
        return chances
    order = np.argsort(importance, kind="stable")
    ascending = importance[order] / importance.max()
    sums = ascending.cumsum()
    smaller = np.arange(1, count + 1)
    free = (
        size + smaller - count
    )  # sum of the p that the `smaller` clients with the smallest values share
    last = int(np.flatnonzero((free > 0) & (free * ascending <= sums))[-1])
    part = order[: last + 1]
    chances[part] = np.minimum(free[last] * ascending[: last + 1] / sums[last], 1.0)
    return chances


def approximate(importance: Floats, size: int, steps: int) -> Floats:
    """Return probabilities p close to those of `optimal`, computed from sums over clients only (the
    paper's Algorithm 2). Σp ≤ size.

    steps: maximum number of times that the p below 1 are scaled up.
    """
    total = importance.sum()
    if not total > 0:
        return optimal(importance, size)
    chances: Floats = np.minimum(importance / total * size, 1.0)
    for _ in range(steps):
        below = chances < 1
        sum_below = chances[below].sum()
        if not sum_below > 0:
            break
        factor = (size - np.count_nonzero(~below)) / sum_below
        chances[below] = np.minimum(chances[below] * factor, 1.0)
        if factor <= 1:
            break
    return chances


def systematic(chances: Floats, generator: np.random.Generator) -> Rows:
    """Draw positions, each with its probability; their number is the sum of the probabilities,
    rounded up or down.

    Uses one random number on shuffled positions (Madow 1949).
    """
    sure = np.flatnonzero(chances >= _SURE)
    order = generator.permutation(np.flatnonzero(chances < _SURE))
    sums = chances[order].cumsum()
    total = float(sums[-1]) if len(sums) else 0.0
    if abs(total - round(total)) < 1e-9 and total > 0:
        sums *= round(total) / total
        total = float(round(total))
    points = np.arange(generator.random(), total, 1.0)
    found = np.searchsorted(sums, points, side="right")
    return np.concatenate([sure, np.unique(order[found[found < len(order)]])])
