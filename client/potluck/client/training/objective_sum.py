"""An objective that is the sum of several objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from potluck.client.objective import Batch, LocalContext, Objective
from potluck.common.settings import plugins


class ObjectiveSum(Objective):
    """The sum of one or more objectives' losses; needs all inputs that any of them needs."""

    def __init__(self, terms: Sequence[Objective]) -> None:
        self.terms = tuple(terms)
        self.needs_received = any(term.needs_received for term in terms)
        self.needs_predictions = any(term.needs_predictions for term in terms)
        self.per_sample = all(term.per_sample for term in terms)
        self.proximal = math.fsum(term.proximal for term in terms)

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        """Return the sum of the losses, added in the objectives' order."""
        first, *others = self.terms
        loss = first.loss(logits, batch, local)
        for term in others:
            loss = loss + term.loss(logits, batch, local)
        return loss


def composed(terms: Sequence[Objective]) -> Objective:
    """Return the objective that a client minimises: the sum of the terms.

    Cross-entropy comes first if none of the terms is a loss of the labels."""
    if not any(term.supervised for term in terms):
        terms = (plugins.create(Objective, "cross-entropy", {}), *terms)
    return terms[0] if len(terms) == 1 else ObjectiveSum(terms)
