"""One record changes the sums behind a noisy answer by no more than the stated sensitivity."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from potluck.client.question import BoundedSums, Question, QuestionContext
from potluck.client.training.questions.context import Context
from potluck.client.training.questions.gradient_norm import GradientNorm
from potluck.client.training.questions.loss import Loss
from potluck.client.training.questions.soft_label import SoftLabel
from potluck.common.errors import TrainingError
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples

CLASSES, FEATURES = 3, 4
QUESTIONS = (Loss(), Context(), GradientNorm(), SoftLabel())


def asked(model: nn.Module, data: Examples) -> QuestionContext:
    return QuestionContext(
        client=ClientId("client-0"),
        round=1,
        data=ClientData(train=data),
        classes=CLASSES,
        groups=0,
        device="cpu",
        model=model,
        pace=0.5,
    )


def samples(count: int, scale: float, seed: int) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    return Examples(
        inputs=scale * torch.randn(count, FEATURES, generator=generator),
        labels=torch.randint(CLASSES, (count,), generator=generator),
    )


def network(scale: float, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(scale)
    return model


def distance(one: BoundedSums, other: BoundedSums) -> float:
    return math.dist(*([each.values[name] for name in one.values] for each in (one, other)))


@settings(deadline=None, max_examples=40)
@given(
    question=st.sampled_from(QUESTIONS),
    count=st.integers(2, 9),
    removed=st.integers(0, 8),
    scales=st.tuples(*[st.sampled_from([0.01, 1.0, 50.0, 1e20])] * 2),
    clip=st.floats(1e-3, 100),
    seed=st.integers(0, 2**31),
)
def test_answer_sums_of_neighbouring_data_differ_by_at_most_the_sensitivity(
    question: Question,
    count: int,
    removed: int,
    scales: tuple[float, float],
    clip: float,
    seed: int,
) -> None:
    model, data = network(scales[0], seed), samples(count, scales[1], seed)
    kept = [place for place in range(count) if place != removed % count]
    fewer = data.subset(torch.tensor(kept, dtype=torch.int64))
    both = [question.bounded_sums(asked(model, each), clip) for each in (data, fewer)]
    assert both[0].sensitivity <= clip
    assert distance(*both) <= both[0].sensitivity * (1 + 1e-9)
    assert all(value >= 0 for each in both for value in each.values.values())


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda each: type(each).__name__)
def test_bounded_means_with_a_large_clip_equal_the_exact_answer(question: Question) -> None:
    model, data = network(1.0, 1), samples(40, 1.0, 2)
    plain = question.answer(asked(model, data))
    found = question.bounded_sums(asked(model, data), 1e4)
    means = {name: value / len(data) for name, value in found.values.items()}
    means.update(found.public)
    if isinstance(question, Context):  # without noise, its losses cover only parts of the samples
        assert means["seconds"] == plain["seconds"]
        plain = {"validation": Loss().answer(asked(model, data))["loss"]}
        means = {"validation": means["validation"]}
    assert means == pytest.approx(plain, rel=1e-4)


class Fragile(nn.Module):
    """A model that fails at records whose first feature is above 5."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if bool((inputs[:, 0] > 5).any()):
            raise ValueError("a record that the model was made for")
        out: torch.Tensor = self.layer(inputs)
        return out


@pytest.mark.parametrize("value", [9.0, math.nan, math.inf])
@pytest.mark.parametrize("question", [Loss(), SoftLabel(), Context()])
def test_record_with_a_non_finite_model_output_adds_nothing_to_the_sums(
    question: Question, value: float
) -> None:
    data = samples(20, 0.1, 3)
    planted = Examples(
        inputs=torch.cat([data.inputs, torch.full((1, FEATURES), value)]),
        labels=torch.cat([data.labels, torch.zeros(1, dtype=torch.int64)]),
    )
    torch.manual_seed(0)
    model: Any = Fragile()
    found, without = (question.bounded_sums(asked(model, each), 1.0) for each in (planted, data))
    assert found.values == pytest.approx(dict(without.values), rel=1e-6)


def test_model_that_always_fails_raises_the_same_error_for_any_records() -> None:
    model: Any = nn.Linear(FEATURES + 1, CLASSES)
    with pytest.raises(TrainingError, match="can't be answered with noise for this model"):
        Loss().bounded_sums(asked(model, samples(5, 1.0, 4)), 1.0)
