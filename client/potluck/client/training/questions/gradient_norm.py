"""The question `gradient-norm`: the norm of the gradient over a client's training samples."""

from __future__ import annotations

import math
from collections.abc import Mapping

from potluck.client.question import BoundedSums, Question, QuestionContext
from potluck.common.errors import RoundClosedError, TrainingError

_AT_ONCE = 256

GRADIENT_NORM = "gradient-norm"


class GradientNorm(Question):
    """Answers `gradient-norm` and a training time (`seconds`), for `feel` and `ocs`.

    gradient-norm: the Euclidean norm of the gradient of the mean cross-entropy over all training
    samples, for any objective; over the trainable parameters, with the model in evaluation mode.
    seconds: predicted time of a training on a virtual clock; 0 on a real one, and if the task has a
    trainer. With noise, the gradient of each sample is first clipped.
    """

    needs_model = True
    hides_records = True

    def answer(self, context: QuestionContext) -> Mapping[str, float]:
        """Compute the gradient in one pass over the samples."""
        if context.own is not None:
            norm, seconds = context.own.gradient_norm(), 0.0
        else:
            norm, seconds = _norm(context), context.pace * len(context.data.train)
        if not (math.isfinite(norm) and norm >= 0):
            raise TrainingError(
                f"the norm of the gradient on the samples of client '{context.client}' is {norm}"
            )
        return {GRADIENT_NORM: norm, "seconds": seconds}

    def bounded_sums(self, context: QuestionContext, clip: float) -> BoundedSums:
        """Return the norm of the sum of clipped gradients.

        One sample changes that sum by a vector of length at most `clip`. By the triangle
        inequality, it changes the norm of the sum by at most `clip`.
        """
        from potluck.client.training.questions.bounded_rows import bounded_sum, sample_gradients

        rows, at_once = sample_gradients(context.model)
        total = bounded_sum(context, GRADIENT_NORM, rows, clip=clip, at_once=at_once)
        return BoundedSums(
            values={GRADIENT_NORM: float(total.norm())},
            sensitivity=clip,
            public={"seconds": context.pace * len(context.data.train)},
        )


def _norm(context: QuestionContext) -> float:
    import torch
    from torch.nn import functional

    samples, device = context.data.train, torch.device(context.device)
    if not len(samples):
        raise TrainingError(f"client '{context.client}' has no training samples")
    model = context.model.to(device).eval()
    parameters = [each for each in model.parameters() if each.requires_grad]
    gradient = [torch.zeros_like(each) for each in parameters]
    positions = torch.arange(len(samples), device=samples.labels.device)
    for batch in torch.split(positions, _AT_ONCE):
        if context.cancelled():
            raise RoundClosedError("the question was withdrawn; no run waits for the answer")
        labels = samples.labels.index_select(0, batch).to(device)
        logits = model(samples.inputs_at(batch).to(device))
        loss = functional.cross_entropy(logits, labels, reduction="sum") / len(samples)
        for total, part in zip(
            gradient, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
        ):
            if part is not None:
                total += part
    squares = sum(float(each.double().square().sum()) for each in gradient)
    return math.sqrt(squares) if squares >= 0 else math.nan
