import pytest
import torch
from torch import nn

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy, check_question
from potluck.client.question import QuestionContext
from potluck.client.training.questions.loss import Loss
from potluck.common.errors import DisclosureRefusedError, TrainingError
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


def test_the_loss_is_the_mean_not_the_sum() -> None:
    for samples in (4, 8):
        assert Loss().answer(context(0.0, samples))["loss"] == pytest.approx(0.693147, abs=1e-6)
    assert Loss().answer(context(2.0))["loss"] == pytest.approx(0.126928, abs=1e-6)


@pytest.mark.parametrize(("weight", "samples"), [(float("nan"), 4), (0.0, 0)])
def test_there_may_be_no_answer(weight: float, samples: int) -> None:
    with pytest.raises(TrainingError, match="'a'"):
        Loss().answer(context(weight, samples))


def test_an_owner_says_which_questions_are_answered() -> None:
    check_question(DisclosurePolicy(questions=("loss",)), "a", "loss")
    with pytest.raises(DisclosureRefusedError, match=r"does not answer 'context'.*allows: loss"):
        check_question(DisclosurePolicy(questions=("loss",)), "a", "context")
    with pytest.raises(DisclosureRefusedError, match="allows: none"):
        check_question(DisclosurePolicy(), "a", "loss")


def test_distances_are_told_only_where_the_owner_allows_the_protocol() -> None:
    with pytest.raises(DisclosureRefusedError, match='"protocol" is not among `sums`'):
        check_question(DisclosurePolicy(), "a", "label-distance")
    check_question(DisclosurePolicy(sums=("total", "protocol")), "a", "label-distance")
    listed = DisclosurePolicy(questions=("label-distance",))
    with pytest.raises(DisclosureRefusedError, match='"protocol" is not among `sums`'):
        check_question(listed, "a", "label-distance")
