"""The question `context`: the features of a client for FLASH's bandit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from potluck.client.question import BoundedSums, Question, QuestionContext
from potluck.client.training.questions.bounded_rows import bounded_sum
from potluck.client.training.samples import (
    cross_entropy,
    mean_loss,
    mean_robust_loss,
    robust_loss,
    validation_split,
)
from potluck.common.errors import TrainingError

_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Context(Question):
    """Answers two losses (`robust`, `validation`) and a training time (`seconds`), for `flash`.

    robust: the mean of the noise-robust loss, with weights alpha and beta, on the training samples;
    the received model's predictions are its pseudo-labels. validation: the mean cross-entropy on
    the samples held back; if the run holds none back, on a tenth of all samples, which are also
    trained on. seconds: estimated time of a training on a virtual clock; 0 on a real one. With
    noise, both losses are over all samples: the choice of the samples held back depends on all
    samples.
    """

    alpha: NonNegativeFloat = 1.0
    beta: NonNegativeFloat = 1.0

    needs_model = True
    hides_records = True

    def answer(self, context: QuestionContext) -> Mapping[str, float]:
        """Compute the numbers in one pass over the samples."""
        context.require_examples("context")
        samples = context.data.train
        device = torch.device(context.device)
        share = context.validation_share or _SHARE
        training, validation = validation_split(samples, share, context.client)
        values = {
            "robust": mean_robust_loss(
                context.model,
                training,
                alpha=self.alpha,
                beta=self.beta,
                device=device,
            ),
            "validation": mean_loss(context.model, validation, device=device),
            "seconds": context.pace * len(samples),
        }
        for name, value in values.items():
            if not math.isfinite(value):
                raise TrainingError(
                    f"the answer '{name}' of client '{context.client}' is {value}: the model "
                    f"diverged, or the client's {len(samples)} samples are too few to hold some "
                    "back"
                )
        return values

    def bounded_sums(self, context: QuestionContext, clip: float) -> BoundedSums:
        """Sum both losses of each sample, as a vector of at most the L2 norm `clip`."""
        robust = robust_loss(self.alpha, self.beta)

        def losses(inputs: Tensor, labels: Tensor) -> Tensor:
            logits = context.model(inputs).detach().double()
            return torch.stack([robust(logits, labels), cross_entropy(logits, labels)], dim=1)

        total = bounded_sum(context, "context", losses, clip=clip).tolist()
        return BoundedSums(
            values=dict(zip(("robust", "validation"), total, strict=True)),
            sensitivity=clip,
            public={"seconds": context.pace * len(context.data.train)},
        )
