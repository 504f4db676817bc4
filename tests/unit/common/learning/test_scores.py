import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from torch import nn

from potluck.common.errors import ProtocolError, TrainingError
from potluck.common.learning.evaluation import evaluate
from potluck.common.learning.scores import EvaluationCounts, Metrics
from potluck.common.task import Examples

CPU = torch.device("cpu")


class Logits(nn.Module):
    """A model that returns its input as logits."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def examples(
    logits: list[list[float]], labels: list[int], groups: list[int] | None = None
) -> Examples:
    return Examples(
        inputs=torch.tensor(logits),
        labels=torch.tensor(labels),
        groups=None if groups is None else torch.tensor(groups),
    )


def counted(data: Examples, *, classes: int = 2, groups: int = 0, batch: int = 2) -> Metrics:
    counts = evaluate(Logits(), data, classes=classes, groups=groups, device=CPU, batch_size=batch)
    return counts.metrics()


def received(**changes: Any) -> EvaluationCounts:
    honest: dict[str, Any] = {
        "loss_sum": 3.5,
        "confusion": [3, 1, 2, 4],
        "group_samples": [4, 6],
        "group_correct": [3, 4],
        "classes": 2,
        "groups": 2,
    }
    return EvaluationCounts.received(**(honest | changes))


def test_evaluation_counts_of_four_samples_equal_hand_computed_values() -> None:
    data = examples(
        [[2.0, 0.0], [0.0, 1.0], [0.0, 3.0], [5.0, 0.0]], [0, 0, 1, 1], groups=[0, 1, 2, 2]
    )
    counts = evaluate(Logits(), data, classes=2, groups=4, device=CPU, batch_size=3)
    assert counts.confusion.tolist() == [[1, 1], [1, 1]]
    assert counts.group_samples.tolist() == [1, 1, 2, 0]
    assert counts.group_correct.tolist() == [1, 0, 1, 0]
    losses = [math.log1p(math.exp(margin)) for margin in (-2, 1, -3, 5)]
    assert counts.loss_sum == pytest.approx(sum(losses), rel=1e-12)
    metrics = counts.metrics()
    assert metrics.accuracy == 0.5
    assert metrics.worst_group_accuracy == 0.0
    assert metrics.weighted_f1 == 0.5


@settings(deadline=None)
@given(
    classes=st.integers(2, 6),
    pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=60),
)
def test_weighted_f1_equals_that_of_scikit_learn(
    classes: int, pairs: list[tuple[int, int]]
) -> None:
    true = [a % classes for a, _ in pairs]
    predicted = [b % classes for _, b in pairs]
    confusion = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(confusion, (true, predicted), 1)
    counts = received(
        confusion=confusion.ravel().tolist(),
        group_samples=[],
        group_correct=[],
        classes=classes,
        groups=0,
    )
    expected = f1_score(
        true,
        predicted,
        average="weighted",
        zero_division=0,  # pyright: ignore[reportArgumentType]  # its guess from a default of "warn"
    )
    assert counts.metrics().weighted_f1 == pytest.approx(expected, abs=1e-12)
    assert counts.metrics().worst_group_accuracy is None


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.floats(-9, 9)), min_size=2, max_size=40
    ),
    cut=st.integers(0, 40),
)
def test_evaluation_counts_of_parts_sum_to_those_of_all_samples(
    rows: list[tuple[int, int, float]], cut: int
) -> None:
    labels = torch.tensor([label for label, _, _ in rows])
    groups = torch.tensor([group for _, group, _ in rows])
    inputs = torch.tensor([[value, 1.0, -value] for _, _, value in rows])

    def counts(part: slice) -> EvaluationCounts:
        data = Examples(inputs=inputs[part], labels=labels[part], groups=groups[part])
        return evaluate(Logits(), data, classes=3, groups=4, device=CPU)

    whole = counts(slice(None))
    total = EvaluationCounts.zero(3, 4) + counts(slice(cut)) + counts(slice(cut, None))
    assert np.array_equal(total.confusion, whole.confusion)
    assert np.array_equal(total.group_samples, whole.group_samples)
    assert np.array_equal(total.group_correct, whole.group_correct)
    assert total.loss_sum == pytest.approx(whole.loss_sum, rel=1e-12)
    assert total.metrics().accuracy == whole.metrics().accuracy


def test_evaluation_without_samples_has_no_metrics() -> None:
    nothing = Metrics(loss=None, accuracy=None, worst_group_accuracy=None, weighted_f1=None)
    assert EvaluationCounts.zero(3, 2).metrics() == nothing
    empty = Examples(inputs=torch.zeros(0, 2), labels=torch.zeros(0, dtype=torch.int64))
    assert counted(empty) == nothing


def test_worst_group_accuracy_ignores_groups_without_samples() -> None:
    data = examples([[1.0, 0.0], [1.0, 0.0]], [0, 1], groups=[1, 3])
    assert counted(data, groups=4).worst_group_accuracy == 0.0
    assert counted(examples([[1.0, 0.0]], [0], groups=[1]), groups=4).worst_group_accuracy == 1.0


def test_samples_without_a_group_count_only_for_accuracy() -> None:
    metrics = counted(examples([[1.0, 0.0]], [0]), groups=4)
    assert metrics.accuracy == 1.0
    assert metrics.worst_group_accuracy is None


def test_evaluation_of_a_diverged_model_has_an_accuracy_and_no_loss() -> None:
    data = examples([[math.nan, 0.0], [0.0, 1.0]], [1, 1])
    counts = evaluate(Logits(), data, classes=2, groups=0, device=CPU)
    assert counts.loss_sum == math.inf
    assert counts.metrics().loss is None
    assert counts.metrics().accuracy == 0.5
    assert received(loss_sum=math.inf).metrics().loss is None


def test_the_model_is_evaluated_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Dropout(0.9), Logits())
    data = examples([[1.0, 0.0]] * 20, [0] * 20)
    counts = evaluate(model.train(), data, classes=2, groups=0, device=CPU)
    assert counts.correct == 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (examples([[1.0, 0.0, 0.0]], [0]), r"shape \(1, 3\) for 1 samples, expected \(1, 2\)"),
        (examples([[1.0, 0.0]], [2]), r"labels are in \[2, 2\], expected \[0, 1\]"),
        (examples([[1.0, 0.0]], [0], groups=[-1]), r"groups are in \[-1, -1\], expected \[0, 3\]"),
    ],
)
def test_inconsistent_evaluation_data_is_refused_naming_the_fault(
    data: Examples, message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        counted(data, groups=4)


def test_consistent_evaluation_counts_are_accepted() -> None:
    metrics = received().metrics()
    assert (metrics.loss, metrics.accuracy) == (0.35, 0.7)
    assert metrics.worst_group_accuracy == pytest.approx(4 / 6)
    assert metrics.weighted_f1 == pytest.approx(0.4 * 6 / 9 + 0.6 * 8 / 11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_sum": math.nan}, "loss_sum has nan, expected a number ≥ 0"),
        ({"loss_sum": -1e-9}, "loss_sum has -1e-09"),
        ({"confusion": [3, 1, 2]}, "confusion has 3, expected 2² entries"),
        ({"confusion": [3, 1, 2, 4, 0]}, "confusion has 5, expected 2² entries"),
        ({"confusion": [3, -1, 2, 4]}, "confusion has -1, expected no entry below 0"),
        ({"confusion": [2**63, 1, 2, 4]}, "confusion has 9223372036854775815, expected ≤"),
        ({"group_samples": [4]}, "group_samples has 1, expected 2 entries"),
        ({"group_samples": [4, 2**64 - 1]}, "group_samples has 18446744073709551619, expected ≤"),
        ({"group_samples": [4, 7]}, "group_samples has 11, expected at most 10 samples"),
        ({"group_correct": [5, 4]}, "at most as many correct samples as samples"),
        ({"group_correct": [-1, 4]}, "at most as many correct samples as samples"),
        ({"group_correct": [2, 4]}, r"consistent with the confusion matrix \(7 correct samples\)"),
        ({"group_correct": [4, 4]}, r"consistent with the confusion matrix \(7 correct samples\)"),
        ({"group_correct": []}, "group_correct has 0, expected 2 entries"),
    ],
)
def test_impossible_evaluation_counts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        received(**changes)


def test_group_counts_may_cover_only_some_samples() -> None:
    assert received(group_samples=[4, 0], group_correct=[3, 0]).metrics().accuracy == 0.7
    with pytest.raises(ProtocolError, match="confusion matrix"):
        received(group_samples=[8, 1], group_correct=[1, 1])
