"""The question `loss`: how well the round's model fits a client's training samples."""

from __future__ import annotations

import math
from collections.abc import Mapping

from potluck.client.question import Question, QuestionContext
from potluck.common.errors import TrainingError


class Loss(Question):
    """`loss`: the mean cross-entropy over all training samples, for any objective.

    Power-of-choice selection (pow-d) asks for it.
    """

    needs_model = True

    def answer(self, context: QuestionContext) -> Mapping[str, float]:
        """Compute the loss in one pass over the samples."""
        loss = _mean(context) if context.own is None else context.own.mean_loss()
        if not math.isfinite(loss):
            raise TrainingError(f"the model's loss on the samples of '{context.client}' is {loss}")
        return {"loss": loss}


def _mean(context: QuestionContext) -> float:
    import torch

    from potluck.common.learning.evaluation import evaluate  # imports torch

    counts = evaluate(
        context.model,
        context.data.train,
        classes=context.classes,
        groups=context.groups,
        device=torch.device(context.device),
    )
    if not counts.samples:
        raise TrainingError(f"client '{context.client}' has no training samples")
    return counts.loss_sum / counts.samples
