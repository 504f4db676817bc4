"""Several objectives as one: their losses add up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from potluck.client.objective import Batch, LocalContext, Objective
from potluck.client.training.objectives.cross_entropy import CrossEntropy


class ObjectiveSum(Objective):
    """The sum of the losses of at least one objective, and all that they need."""

    def __init__(self, terms: Sequence[Objective]) -> None:
        self.terms = tuple(terms)
        self.needs_received = any(term.needs_received for term in terms)
        self.needs_predictions = any(term.needs_predictions for term in terms)
        self.proximal = math.fsum(term.proximal for term in terms)

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        """In the order named."""
        first, *others = self.terms
        loss = first.loss(logits, batch, local)
        for term in others:
            loss = loss + term.loss(logits, batch, local)
        return loss


def composed(terms: Sequence[Objective]) -> Objective:
    """What a client descends on: the sum of these, with cross-entropy first where none of them is
    a loss of the labels."""
    if not any(term.supervised for term in terms):
        terms = (CrossEntropy(), *terms)
    return terms[0] if len(terms) == 1 else ObjectiveSum(terms)
