"""The question `loss`: how well the round's model fits a client's training samples."""

from __future__ import annotations

import math
from collections.abc import Mapping

from potluck.client.question import BoundedSums, Question, QuestionContext
from potluck.common.errors import TrainingError


class Loss(Question):
    """Answers `loss`: the mean cross-entropy over all training samples, for any objective.

    The selector `pow-d` (power of choice) asks this question. With noise, each sample's loss is at
    most the clip.
    """

    needs_model = True
    hides_records = True

    def answer(self, context: QuestionContext) -> Mapping[str, float]:
        """Compute the loss in one pass over the samples."""
        loss = _mean(context) if context.own is None else context.own.mean_loss()
        if not math.isfinite(loss):
            raise TrainingError(
                f"the model's loss on the samples of client '{context.client}' is {loss}"
            )
        return {"loss": loss}

    def bounded_sums(self, context: QuestionContext, clip: float) -> BoundedSums:
        """Sum the losses, each limited to `clip`; one sample changes the sum by at most `clip`."""
        from torch import Tensor
        from torch.nn import functional

        from potluck.client.training.questions.bounded_rows import bounded_sum

        def losses(inputs: Tensor, labels: Tensor) -> Tensor:
            logits = context.model(inputs).detach().double()
            return functional.cross_entropy(logits, labels, reduction="none")[:, None]

        total = bounded_sum(context, "loss", losses, clip=clip)
        return BoundedSums(values={"loss": float(total)}, sensitivity=clip)


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
