"""The question `soft-label`: a trained model's mean prediction, before the update is sent."""

from __future__ import annotations

from collections.abc import Mapping

from potluck.client.question import BoundedSums, Question, QuestionContext
from potluck.common.errors import TrainingError

_BATCH = 1024


class SoftLabel(Question):
    """Answers `class-0`, `class-1`, …: a model's mean softmax output over the training samples.

    This mean approximates the distribution of the client's labels. FedEntropy asks for the trained
    model's mean.
    """

    needs_model = True
    hides_records = True

    def answer(self, context: QuestionContext) -> Mapping[str, float]:
        """Compute the mean in one pass over the samples."""
        import torch

        context.require_examples("soft-label")
        model, examples = context.model, context.data.train
        if not len(examples):
            raise TrainingError(f"client '{context.client}' has no training samples")
        was_training = model.training
        model.to(context.device).eval()
        total = torch.zeros(context.classes, dtype=torch.float64, device=context.device)
        try:
            with torch.no_grad():
                for start in range(0, len(examples), _BATCH):
                    batch = torch.arange(start, min(start + _BATCH, len(examples)))
                    outputs = model(examples.inputs_at(batch).to(context.device)).double()
                    total += outputs.softmax(dim=1).sum(dim=0)
        finally:
            model.train(was_training)
        shares = (total / len(examples)).cpu()
        if not bool(torch.isfinite(shares).all()):
            raise TrainingError(
                f"the model's outputs on the samples of client '{context.client}' are NaN"
            )
        return {f"class-{number}": share for number, share in enumerate(shares.tolist())}

    def bounded_sums(self, context: QuestionContext, clip: float) -> BoundedSums:
        """Sum the softmaxes.

        Probabilities that add up to 1 have an L2 norm of at most 1. So one sample changes the sum
        by at most the smaller of `clip` and 1.
        """
        import torch

        from potluck.client.training.questions.bounded_rows import bounded_sum

        def shares(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
            return torch.softmax(context.model(inputs).detach().double(), dim=1)

        sensitivity = min(clip, 1.0)
        total = bounded_sum(context, "soft-label", shares, clip=sensitivity).tolist()
        values = {f"class-{number}": share for number, share in enumerate(total)}
        return BoundedSums(values=values, sensitivity=sensitivity)
