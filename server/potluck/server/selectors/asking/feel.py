"""FEEL: prefers clients with large gradients and short trainings.

Ren, He, Wen, Yu, Huang and Shi, "Scheduling for Cellular Federated Edge Learning With Importance
and Channel Awareness". Selection probabilities weigh the norm of a client's gradient against its
training time.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from potluck.common.settings.extras import require
from potluck.server.selection import (
    Answers,
    Ask,
    Floats,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.selectors.parts.choosing import Cohort, draw_weighted, grown, samples_or_mean
from potluck.server.selectors.parts.durations import estimated, known_or_mean, noted
from potluck.server.selectors.parts.reported import column, plausible
from potluck.server.state import State

_KIND = "gradient-norm"
_FACTOR = 100.0
"""Maximum plausible gradient norm, as a multiple of the clients' median; larger norms are limited
to it."""
_NOTHING = 1e-100
"""Smallest share of the total importance that is used; smaller shares are taken as 0. The square of
this number is still a valid double."""


@dataclass(frozen=True, kw_only=True)
class Feel(Selector):
    """Prefers clients with a large gradient and a short training time.

    Draws the cohort client by client, with probabilities ∝ n‖g‖ √(ρ / ((1 − ρ) T + λ)). n: number
    of the client's samples. g: gradient of its mean loss at the round's model; all clients are
    asked for ‖g‖ in every round. T: seconds of its last training. λ makes the probabilities sum to
    1. rho: ρ in (0, 1]; 1 ignores the training time. unbiased: True to draw with replacement and
    weight an update by draws · n_k / (n · count · p_k) instead of its samples. The expected sum
    over the draws is then the sum over all clients; cohorts may have fewer than `count` clients.
    Strategies divide by the sum of the weights, which is 1 only on average.

    Clients that report no gradient come last; with `unbiased`, they are drawn only if no client
    reports one. O(K).
    """

    rho: Annotated[float, Field(gt=0, le=1)] = 0.5
    unbiased: bool = False

    asks_questions = frozenset({_KIND})

    def __post_init__(self) -> None:
        require("scipy", "potluck[server]")
        object.__setattr__(self, "sets_weights", self.unbiased)  # the dataclass is frozen

    def init(self, population: Population) -> State:
        """Return a state in which no duration is known."""
        return State(arrays={"seconds": np.full(len(population), np.nan)})

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """Return the cohort, in the order drawn."""
        generator = context.generator("feel")
        cohort = Cohort(context, generator)
        if not cohort.size:
            return cohort.selection()
        available, clients = context.available, len(context.population)
        answers = yield Ask(rows=available, kind=_KIND, names=(_KIND, "seconds"))
        norms = plausible(column(answers, _KIND, clients), factor=_FACTOR)[available]
        told = ~np.isnan(norms)
        known, norms = available[told], norms[told]
        seconds = known_or_mean(self._seconds(state, clients, [answers]))[known]
        sizes = samples_or_mean(context.population, known)
        shares = sizes / sizes.sum()
        chances = probabilities(shares * norms, seconds, self.rho)
        if self.unbiased:
            if not len(known):
                sizes = samples_or_mean(context.population, available)
                known, shares = available, sizes / sizes.sum()
                chances = np.full(len(available), 1 / len(available))
            return with_repeats(known, shares, chances, cohort.size, generator)
        drawn = draw_weighted(chances, min(cohort.size, len(known)), generator)
        cohort.extend(
            known[drawn].tolist(),
            [
                f"gradient {norms[each]:.3g}, {seconds[each]:.3g} s: "
                f"probability {chances[each]:.3g} for a draw"
                for each in drawn
            ],
        )
        cohort.draw(cohort.missing, "gave no gradient norm; drawn uniformly")
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Store the durations of this round's trainings."""
        rows = [outcome.cohort, *(answers.rows for answers in outcome.answers)]
        clients = 1 + max(int(each.max(initial=-1)) for each in rows)
        clients = max(clients, len(state.arrays["seconds"]))
        seconds = self._seconds(state, clients, outcome.answers)
        return State(arrays={"seconds": noted(seconds, outcome)})

    def _seconds(self, state: State, clients: int, heard: Sequence[Answers]) -> Floats:
        """Return the seconds of each client's last training, also for clients that have joined
        since the last round."""
        seconds = grown(state.arrays["seconds"], clients, math.nan)
        for answers in heard:
            seconds = estimated(seconds, column(answers, "seconds", len(seconds)))
        return seconds


def with_repeats(
    rows: Rows, shares: Floats, chances: Floats, draws: int, generator: np.random.Generator
) -> Selection:
    """Draw with replacement; return each drawn client once, with the weight of its update.

    shares: n_k / n, each client's share of the samples, above 0. chances: p_k, probability of each
    client; both sum to 1. draws: number of draws.
    """
    drawn = generator.choice(len(rows), size=draws, p=chances)
    places, times = np.unique(drawn, return_counts=True)
    counted = times * shares[places] / (draws * chances[places])
    return Selection(
        rows=rows[places],
        reasons=[
            f"drawn {time} times of {draws} with probability {chance:.3g}"
            for time, chance in zip(times.tolist(), chances[places].tolist(), strict=True)
        ],
        weights=counted,
    )


def probabilities(importance: Floats, seconds: Floats, rho: float) -> Floats:
    """Return p = importance · √(ρ / ((1 − ρ) seconds + λ)), with the λ > −(1 − ρ) min seconds that
    makes Σp = 1; equal probabilities if all importances are 0.

    importance: ≥ 0. seconds: > 0.
    """
    from scipy.optimize import brentq  # a slow import, not needed to list selectors

    total = float(importance.sum())
    if not total > 0:
        return np.full(len(importance), 1 / max(1, len(importance)))
    weights = importance / total
    weights[weights < _NOTHING] = 0.0
    # With μ = (λ + (1 − ρ) min T) / (ρ total²), the sum of p is Σ weight / √(delay + μ), which
    # falls as μ grows. It is at least 1 if μ is the square of the largest weight of the quickest
    # clients, and at most 1 if μ is 1: the root lies between.
    delays = seconds - seconds[weights > 0].min()
    with np.errstate(over="ignore", under="ignore"):
        delays = np.maximum((1 - rho) * delays / total / total / rho, 0.0)
    kept = (weights > 0) & np.isfinite(delays)
    shares, late = weights[kept], delays[kept]

    def excess(logarithm: float) -> float:
        return float((shares / np.sqrt(late + math.exp(logarithm))).sum()) - 1

    low = 2 * math.log(shares[late == 0].max())
    root: Any = low if excess(low) <= 0 else brentq(excess, low, 1e-9, xtol=1e-12)
    found = np.zeros(len(weights))
    found[kept] = shares / np.sqrt(late + math.exp(root))
    chances: Floats = found / found.sum()
    return chances
