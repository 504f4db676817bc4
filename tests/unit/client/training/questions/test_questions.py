import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy, check_question
from potluck.client.question import Question, QuestionContext
from potluck.client.training.questions.availability import Availability
from potluck.client.training.questions.gradient_norm import GradientNorm
from potluck.client.training.questions.loss import Loss
from potluck.client.training.questions.soft_label import SoftLabel
from potluck.common.errors import DisclosureRefusedError, RoundClosedError, TrainingError
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples


def context(weight: float, samples: int = 4) -> QuestionContext:
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[weight], [0.0]]))
    data = Examples(inputs=torch.ones(samples, 1), labels=torch.zeros(samples, dtype=torch.int64))
    return QuestionContext(
        client=ClientId("a"),
        round=1,
        data=ClientData(train=data),
        classes=2,
        groups=0,
        device=torch.device("cpu"),
        model=model,
    )


def test_loss_answer_is_the_mean_and_not_the_sum() -> None:
    for samples in (4, 8):
        assert Loss().answer(context(0.0, samples))["loss"] == pytest.approx(0.693147, abs=1e-6)
    assert Loss().answer(context(2.0))["loss"] == pytest.approx(0.126928, abs=1e-6)


@pytest.mark.parametrize("question", [Loss(), GradientNorm(), SoftLabel()])
@pytest.mark.parametrize(("weight", "samples"), [(float("nan"), 4), (0.0, 0)])
def test_question_without_a_finite_answer_is_refused(
    question: Question, weight: float, samples: int
) -> None:
    with pytest.raises(TrainingError, match="'a'"):
        question.answer(context(weight, samples))


def test_soft_label_is_the_mean_model_output() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout())
    data = Examples(inputs=torch.randn(2500, 3), labels=torch.zeros(2500, dtype=torch.int64))
    given = replace(context(0.0), model=model, data=ClientData(train=data), classes=4)
    found = SoftLabel().answer(given)
    wanted = model.eval()(data.inputs).softmax(dim=1).mean(dim=0)
    assert list(found) == ["class-0", "class-1", "class-2", "class-3"]
    assert list(found.values()) == pytest.approx(wanted.tolist(), abs=1e-6)


def test_gradient_norm_is_that_of_the_mean_loss() -> None:
    """The gradient of −log softmax(w)₀ with respect to both weights is (−½, ½) at w = 0."""
    for samples in (4, 600):
        found = GradientNorm().answer(context(0.0, samples))
        assert found["gradient-norm"] == pytest.approx(0.5**0.5, rel=1e-6)
    given = replace(context(2.0), pace=3.0)
    probability = 1 / (1 + math.exp(-2))
    assert GradientNorm().answer(given) == {
        "gradient-norm": pytest.approx((1 - probability) * 2**0.5, rel=1e-5),
        "seconds": 12.0,
    }
    assert all(each.grad is None for each in given.model.parameters()), "trainings start clean"


def test_gradient_norm_excludes_frozen_parameters() -> None:
    """The reference is the gradient of one batch, computed by torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    data = Examples(inputs=torch.randn(700, 3), labels=torch.randint(2, (700,)))
    given = replace(context(0.0), model=model, data=ClientData(train=data))
    found = GradientNorm().answer(given)["gradient-norm"]
    loss = nn.functional.cross_entropy(model.eval()(data.inputs), data.labels)
    parts = torch.autograd.grad(loss, list(model[3].parameters()))
    assert found == pytest.approx(
        float(sum(part.square().sum() for part in parts)) ** 0.5, rel=1e-5
    )


def test_cancelled_question_ends() -> None:
    with pytest.raises(RoundClosedError):
        GradientNorm().answer(replace(context(0.0), cancelled=lambda: True))


def test_question_that_the_owner_does_not_allow_is_refused() -> None:
    check_question(DisclosurePolicy(questions=("loss",)), "a", "loss")
    with pytest.raises(
        DisclosureRefusedError, match=r"does not answer the question 'context'.*lists: loss"
    ):
        check_question(DisclosurePolicy(questions=("loss",)), "a", "context")
    with pytest.raises(DisclosureRefusedError, match="lists: none"):
        check_question(DisclosurePolicy(), "a", "loss")


def test_label_distance_is_refused_unless_the_owner_allows_the_protocol() -> None:
    with pytest.raises(DisclosureRefusedError, match='does not list "unsafe-stepwise"'):
        check_question(DisclosurePolicy(), "a", "label-distance")
    check_question(DisclosurePolicy(sums=("total", "unsafe-stepwise")), "a", "label-distance")
    listed = DisclosurePolicy(questions=("label-distance",))
    with pytest.raises(DisclosureRefusedError, match='does not list "unsafe-stepwise"'):
        check_question(listed, "a", "label-distance")


def test_availability_answer_is_the_forecast_of_the_plan() -> None:
    given = replace(context(0.0), available=lambda begin, end: 0.25 + (begin, end).count(10.0))
    assert Availability(begin=5.0, end=20.0).answer(given) == {"availability": 0.25}
    with pytest.raises(TrainingError, match="'a'"):
        Availability(begin=10.0, end=20.0).answer(given)
    assert Availability().answer(context(0.0)) == {"availability": 1.0}, "who has no plan"
