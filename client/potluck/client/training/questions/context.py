"""The question `context`: the features of a client for FLASH's bandit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat

from potluck.client.question import Question, QuestionContext
from potluck.client.training.samples.validation import mean_loss, mean_robust_loss, validation_split
from potluck.common.errors import TrainingError

_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Context(Question):
    """`robust`, `validation` and `seconds`; the selector `flash` asks them.

    robust: the mean of the noise-robust loss, with weights alpha and beta, on the training samples;
    the received model's predictions are its pseudo-labels. validation: the mean cross-entropy on
    the samples held back; if the run holds none back, on a tenth of all samples, which are also
    trained on. seconds: estimated time of a training on a virtual clock; 0 on a real one.
    """

    alpha: NonNegativeFloat = 1.0
    beta: NonNegativeFloat = 1.0

    needs_model = True

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
                    f"the number '{name}' of '{context.client}' is {value}: the model diverged, "
                    f"or its {len(samples)} samples are too few to keep some back"
                )
        return values
