"""The question `label-entropy`: an estimate of how balanced a client's labels are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from pydantic import PositiveFloat

from potluck.client.question import Question, QuestionContext
from potluck.common.errors import ProtocolError, TrainingError
from potluck.common.learning.output_layer import label_entropies, output_tensor


@dataclass(frozen=True, kw_only=True)
class LabelEntropy(Question):
    """Answers `label-entropy`: Ĥ, an estimate of the entropy of labels in nats, for `hics-fl`.

    Ĥ is the entropy of softmax(Δb / temperature). Δb is the change of the output layer's bias in
    one training, or of the row means of its weights if it has no bias.
    """

    temperature: PositiveFloat = 0.0025

    needs_model = True

    def answer(self, context: QuestionContext) -> Mapping[str, float]:
        """Train once and discard the update; only the entropy is sent."""
        if context.local_update is None:
            raise ProtocolError(
                "question 'label-entropy' lacks the run's training settings; install the same "
                "release on the host and the coordinator"
            )
        update = context.local_update()
        name = output_tensor(update, context.classes)
        if name is None:
            raise TrainingError(
                f"the model of client '{context.client}' has no output layer of "
                f"{context.classes} classes, which the selector needs; choose another selector"
            )
        move = update[name].astype(np.float64).reshape(context.classes, -1).mean(axis=1)
        if not np.isfinite(move).all():
            raise TrainingError(
                f"the update of client '{context.client}' contains NaN or infinity; lower "
                "training.learning_rate"
            )
        [entropy] = label_entropies(move[None], self.temperature).tolist()
        return {"label-entropy": entropy}
