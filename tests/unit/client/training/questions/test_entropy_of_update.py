"""The label entropy estimated from an update, reported without the update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from potluck.client.question import QuestionContext
from potluck.client.training.questions.entropy_of_update import LabelEntropy
from potluck.common.errors import ConfigurationError, ProtocolError, TrainingError
from potluck.common.names import ClientId
from potluck.common.settings.plugins import create
from potluck.common.task import ClientData


def asked(update: dict[str, Any] | None, *, classes: int = 3) -> QuestionContext:
    arrays = {name: np.array(each, np.float32) for name, each in (update or {}).items()}
    data: ClientData[Any] = ClientData(train=None, held_out=None)
    return QuestionContext(
        client=ClientId("client-1"),
        round=1,
        data=data,
        classes=classes,
        groups=0,
        device="cpu",
        model=None,
        local_update=None if update is None else lambda: arrays,
    )


def test_label_entropy_of_an_update_equals_the_worked_example() -> None:
    """A worked example: Δb / T = (1, 0, −1)."""
    update = {"head.weight": np.ones((3, 2)), "head.bias": [0.5, 0.0, -0.5]}
    told = LabelEntropy(temperature=0.5).answer(asked(update))
    assert told == {"label-entropy": pytest.approx(0.83240, abs=1e-5)}


def test_label_entropy_without_a_bias_uses_the_weight_rows() -> None:
    update = {"head.weight": [[2.0, 0.0], [0.0, 0.0], [-2.0, 0.0]]}
    told = LabelEntropy(temperature=1.0).answer(asked(update))
    assert told["label-entropy"] == pytest.approx(0.83240, abs=1e-5)


def test_label_entropy_without_settings_output_layer_or_finite_values_is_refused() -> None:
    question = LabelEntropy()
    with pytest.raises(ProtocolError, match="lacks the run's training settings"):
        question.answer(asked(None))
    update = {"head.bias": [0.5, 0.0, -0.5]}
    with pytest.raises(TrainingError, match="no output layer of 4 classes"):
        question.answer(replace(asked(update), classes=4))
    with pytest.raises(TrainingError, match="contains NaN or infinity"):
        question.answer(asked({"head.bias": [0.5, np.nan, 0.0]}))
    with pytest.raises(ConfigurationError, match="temperature"):
        create(LabelEntropy, "label-entropy", {"temperature": 0})
