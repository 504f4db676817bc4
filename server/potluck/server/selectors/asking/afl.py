"""Active federated learning (AFL): draws clients with large losses with higher probability.

Goetz et al., "Active Federated Learning", 2019, Alg. 1.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat

from potluck.server.selection import (
    Answers,
    Ask,
    Floats,
    Population,
    RoundOutcome,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.selectors.parts.choosing import Cohort, draw_weighted, grown, samples_or_mean
from potluck.server.selectors.parts.reported import plausible
from potluck.server.state import State

Share = Annotated[float, Field(ge=0, le=1)]
_LOSS = "loss"
_FACTOR = 100.0
"""Maximum plausible loss, as a multiple of the clients' median; larger losses are limited to it."""


@dataclass(frozen=True, kw_only=True)
class Afl(Selector):
    """Draws clients with a large loss and many samples more often.

    A client's valuation is its loss times the root of its number of samples. alpha1: share of the
    available clients, those with the lowest valuations, that are drawn only uniformly. alpha2:
    factor of valuations v in the probability ∝ exp(alpha2 · v). alpha3: share of the cohort that is
    drawn uniformly; a fraction of a place is drawn uniformly with that probability.

    The cohort reports its loss under the round's model before it trains. A client without a
    valuation is given the largest valuation of the others. O(K).
    """

    alpha1: Share = 0.75
    alpha2: NonNegativeFloat = 0.01
    alpha3: Share = 0.1

    asks_questions = frozenset({_LOSS})

    def init(self, population: Population) -> State:
        """Return a state with a row for the last loss of each client, NaN at first."""
        return State(arrays={"loss": np.full(len(population), np.nan)})

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """Draw the cohort, then ask its clients for their losses, which later rounds use."""
        generator = context.generator("afl")
        cohort = Cohort(context, generator)
        values = self._valuations(state, context)
        # the largest valuations come first; equal valuations are in random order
        order = np.lexsort((generator.random(len(values)), -values))
        kept = order[: len(values) - _whole(self.alpha1 * len(values))]
        exponents = self.alpha2 * values[kept]
        weights = np.exp(exponents - exponents.max(initial=-np.inf))
        # rounding down would leave a cohort of one without any weighted place
        places = int((1 - self.alpha3) * cohort.size + generator.random())
        drawn = kept[draw_weighted(weights, places, generator)]
        reasons = [f"valuation {value:.4g}" for value in values[drawn].tolist()]
        cohort.extend(context.available[drawn].tolist(), reasons)
        cohort.draw(cohort.missing, "drawn uniformly")
        selection = cohort.selection()
        if cohort.rows:
            yield Ask(rows=np.sort(selection.rows), kind=_LOSS)
        return selection

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Store the valid losses that the cohort reported; a client without one keeps its last."""
        length = max(len(state.arrays["loss"]), int(outcome.selected.max(initial=-1)) + 1)
        losses = grown(state.arrays["loss"], length, math.nan)
        for answers in outcome.answers:
            if _LOSS in answers.values:
                told = answers.values[_LOSS]
                valid = np.isfinite(told) & (told >= 0)
                losses[answers.rows[valid]] = told[valid]
        return State(arrays={"loss": losses})

    def _valuations(self, state: State, context: SelectionContext) -> Floats:
        """Return √n · loss of each available client."""
        known = grown(state.arrays["loss"], len(context.population), math.nan)
        losses = plausible(known, factor=_FACTOR)
        samples = samples_or_mean(context.population, context.available)
        values: Floats = np.sqrt(samples) * losses[context.available]
        known = ~np.isnan(values)
        return np.where(known, values, values[known].max() if known.any() else 0.0)


def _whole(number: float) -> int:
    """Round down. (1 − 0.8) · 5 is slightly below 1 in floating point, and must give 1."""
    return int(number + 1e-9)
