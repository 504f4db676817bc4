"""Power of choice (pow-d): selects the clients with the largest loss among some candidates.

Cho, Wang and Joshi, "Towards Understanding Biased Client Selection in Federated Learning".
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt

from potluck.server.selection import (
    Answers,
    Ask,
    Rows,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.selectors.parts.choosing import (
    TIE_DECIMALS,
    Cohort,
    draw_weighted,
    samples_or_mean,
)
from potluck.server.selectors.parts.reported import column, plausible
from potluck.server.state import State

_FACTOR = 100.0
"""Maximum plausible loss, as a multiple of the clients' median; larger losses are limited to it."""


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(Selector):
    """Asks random candidates for their loss; selects those with the largest losses.

    The loss is that of the round's model. candidates: number of clients asked, at least the
    cohort's size and at most all available clients; 0 for twice the cohort's size. draw: how
    candidates are drawn: with probability ∝ `samples` (unknown numbers are replaced by the mean of
    the others), or `uniform`. order: `desc` selects the largest losses; `asc` the smallest, as some
    papers print it.

    Candidates that don't answer with a number ≥ 0 are replaced by other clients, drawn uniformly.
    Such candidates are selected only if no other clients are left. O(K + candidates · log
    candidates).
    """

    candidates: NonNegativeInt = 0
    draw: Literal["samples", "uniform"] = "samples"
    order: Literal["desc", "asc"] = "desc"

    asks_questions = frozenset({"loss"})

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """Return the `count` candidates with the largest losses, in that order."""
        generator = context.generator("pow-d")
        cohort = Cohort(context, generator)
        if not cohort.size:
            return cohort.selection()
        asked = self._drawn(context, generator)
        answers = yield Ask(rows=asked, kind="loss")
        losses = plausible(column(answers, "loss", len(context.population)), factor=_FACTOR)[asked]
        keys = np.round(losses if self.order == "asc" else -losses, TIE_DECIMALS)
        rank = np.lexsort((generator.random(len(asked)), keys))
        best = rank[: min(cohort.size, int(np.isfinite(losses).sum()))]  # NaN comes last
        cohort.extend(
            asked[best].tolist(),
            [f"loss {loss:.4g}, one of {len(asked)} asked" for loss in losses[best].tolist()],
        )
        others = np.setdiff1d(context.available, asked)
        cohort.draw(cohort.missing, "in place of a candidate without a loss", others)
        cohort.draw(cohort.missing, "sent no loss; no other client is left")
        return cohort.selection()

    def _drawn(self, context: SelectionContext, generator: np.random.Generator) -> Rows:
        """Draw the candidates; return them sorted."""
        available = context.available
        wanted = max(self.candidates or 2 * context.count, context.count)
        if wanted >= len(available):
            return available
        weights = np.ones(len(available))
        if self.draw == "samples":
            weights = samples_or_mean(context.population, available)
        return np.sort(available[draw_weighted(weights, wanted, generator)])
