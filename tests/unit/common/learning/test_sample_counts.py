"""Counts of a client's samples."""

from __future__ import annotations

import pytest
import torch

from potluck.common.errors import TrainingError
from potluck.common.learning.sample_counts import interaction_matrix, label_counts
from potluck.common.task import Examples


def examples(labels: list[int], groups: list[int] | None = None) -> Examples:
    return Examples(
        inputs=torch.zeros(len(labels), 1),
        labels=torch.tensor(labels, dtype=torch.int64),
        groups=None if groups is None else torch.tensor(groups, dtype=torch.int64),
    )


def test_samples_are_counted_by_class_and_attribute() -> None:
    some = examples([0, 0, 2, 2, 2], [0, 1, 4, 5, 5])
    assert label_counts(some, 3) == [2, 0, 3]
    assert interaction_matrix(some, 3, 6) == [[1, 1], [0, 0], [1, 2]]
    assert label_counts(examples([]), 2) == [0, 0]


@pytest.mark.parametrize(
    ("labels", "groups", "number"),
    [([0, 1], None, 4), ([0, 1], [0, 2], 3), ([0, 1], [2, 0], 4), ([0, 1], [0, 9], 4)],
)
def test_groups_that_do_not_encode_attributes_are_refused(
    labels: list[int], groups: list[int] | None, number: int
) -> None:
    with pytest.raises(TrainingError):
        interaction_matrix(examples(labels, groups), 2, number)


def test_counting_labels_out_of_range_is_refused() -> None:
    with pytest.raises(TrainingError, match="labels"):
        label_counts(examples([0, 3]), 3)
