"""A selector that prefers updates which raise the entropy of a cohort's labels (FedEntropy).

Ling et al., "FedEntropy: Efficient Device Grouping for Federated Learning Using Maximum Entropy
Judgment". The grouping follows the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from potluck.server.selection import (
    BeforeUpload,
    Floats,
    Offers,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
    Spared,
)
from potluck.server.selectors.parts.choosing import TIE, Cohort, draw_weighted, grown
from potluck.server.selectors.parts.label_entropy import bits
from potluck.server.state import State

_QUESTION = "soft-label"
_LEAST = 1e-6
"""Minimum weight of a client; halving never goes below it."""
_MOST = 1e6


@dataclass(frozen=True, kw_only=True)
class FedEntropy(Selector):
    """Skips uploads that make labels less even; prefers clients that were not skipped.

    After training, clients report their soft label: the mean softmax of the trained model over
    their samples. The soft labels are combined, weighted by samples, and their entropy is computed.
    As long as the entropy rises, the client whose removal raises it most skips its upload.

    exploration: share of rounds whose cohort is drawn uniformly (grouping `weights`), or among the
    clients that skipped their last upload (`pools`). grouping: `weights` draws with probability ∝ a
    weight that starts at 1, grows by 1 with each wanted update, and halves with each skipped one;
    `pools` draws uniformly among the clients whose last update was wanted. O(K + count² · classes).
    """

    exploration: Annotated[float, Field(ge=0, le=1)] = 0.2
    grouping: Literal["weights", "pools"] = "weights"

    asks_questions = frozenset({_QUESTION})

    def init(self, population: Population) -> State:
        """Return the initial state.

        Its array `weights` has a number for each client, float64: > 0, or with `pools` 1 (wanted)
        or 0 (skipped)."""
        return State(arrays={"weights": np.ones(len(population))})

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return `count` clients, drawn by their weights."""
        generator = context.generator("fedentropy")
        cohort = Cohort(context, generator)
        weights = grown(state.arrays["weights"], len(context.population), 1)[context.available]
        explores = generator.random() < self.exploration
        if self.grouping == "pools":
            wanted = (weights == 0) if explores else (weights > 0)
            why = "spared when last selected" if explores else "not spared when last selected"
            cohort.draw(cohort.missing, why, context.available[wanted])
            cohort.draw(cohort.missing, "too few others")
        elif explores:
            cohort.draw(cohort.missing, "explored")
        else:
            drawn = draw_weighted(weights, cohort.size, generator)
            reasons = [f"weight {weight:.4g}" for weight in weights[drawn].tolist()]
            cohort.extend(context.available[drawn].tolist(), reasons)
        return cohort.selection()

    def before_upload(self, classes: int) -> BeforeUpload:
        """Return the question for the mean softmax of the trained model over the client's
        samples."""
        return BeforeUpload(kind=_QUESTION, names=[f"class-{each}" for each in range(classes)])

    def spare(self, state: State, offers: Offers) -> Spared:
        """Return the clients that skip their upload, because the labels are more even without
        them."""
        labels = np.stack([offers.values[f"class-{each}"] for each in range(len(offers.values))])
        shares = _shares(labels.T) * _sizes(offers.samples)[:, None]
        left = list(range(len(shares)))
        spared: list[int] = []
        reasons: list[str] = []
        entropy = float(bits(shares.sum(axis=0)))
        while len(left) > 1:
            total = shares[left].sum(axis=0)
            without = bits(np.clip(total - shares[left], 0, None))
            best = int(without.argmax())
            if without[best] <= entropy + TIE:
                break
            gain, entropy = without[best] - entropy, float(without[best])
            spared.append(left.pop(best))
            reasons.append(f"without it the labels' entropy is {gain:.3g} bits higher")
        return Spared(rows=offers.rows[spared], reasons=reasons)

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Raise the weights of clients with wanted updates; lower those of clients that skipped.

        Clients that failed keep their weight.
        """
        length = int(outcome.selected.max(initial=-1)) + 1
        weights = grown(state.arrays["weights"], length, 1)
        wanted = np.setdiff1d(outcome.included, outcome.spared)
        if self.grouping == "pools":
            weights[wanted], weights[outcome.spared] = 1.0, 0.0
        else:
            weights[wanted] = np.minimum(weights[wanted] + 1, _MOST)
            weights[outcome.spared] = np.maximum(weights[outcome.spared] / 2, _LEAST)
        return State(arrays={"weights": weights})


def _shares(told: Floats) -> Floats:
    """Return the reported soft labels as shares, clients × classes. Every row sums to 1, even if
    the report was invalid."""
    clipped = np.clip(told, 0, 1)
    sums = clipped.sum(axis=1, keepdims=True)
    even = np.full_like(clipped, 1 / clipped.shape[1])
    result: Floats = np.where(sums > 0, clipped / np.where(sums > 0, sums, 1), even)
    return result


def _sizes(samples: Rows) -> Floats:
    """Return numbers of samples. Unknown numbers are replaced by the mean of the reported ones, or
    by 1 if there are none."""
    sizes = samples.astype(np.float64)
    known = sizes > 0
    return np.where(known, sizes, sizes[known].mean() if known.any() else 1.0)
