"""A task's data is checked, and errors name the task."""

from __future__ import annotations

import pytest
import torch

from potluck.common.errors import StorageError, TrainingError
from potluck.common.learning.task_checks import check_client_data, check_finite, check_lengths
from potluck.common.learning.task_failures import blamed_on_task
from potluck.common.task import ClientData, Examples
from potluck.common.tasks.stored import Stored, StoredExamples

LABELS = torch.zeros(20, dtype=torch.int64)


def stored(rows: int) -> StoredExamples:
    array = torch.ones(100, 2)
    inputs = Stored(array=array, rows=torch.arange(rows), prepare=lambda samples, _: samples)
    return StoredExamples(inputs=inputs, labels=LABELS)


def test_samples_without_exactly_one_label_are_refused() -> None:
    whole = Examples(inputs=torch.ones(20, 2), labels=LABELS, groups=LABELS)
    check_client_data(ClientData(train=whole, held_out=stored(20)), "t", "client-0")
    with pytest.raises(TrainingError, match="data of client 'client-0': task 't' returned 19 inp"):
        check_client_data(ClientData(train=whole, held_out=stored(19)), "t", "client-0")
    with pytest.raises(
        TrainingError, match="the data: task 't' returned 20 inputs, 20 labels and 3 groups"
    ):
        check_lengths(
            Examples(inputs=whole.inputs, labels=LABELS, groups=LABELS[:3]), "t", "the data"
        )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_first_sample_with_nan_or_infinity_is_named_in_the_error(bad: float) -> None:
    inputs = torch.ones(10_000, 2, 2)
    inputs[[6000, 9000], 1, 0] = bad
    labels = torch.zeros(10_000, dtype=torch.int64)
    with pytest.raises(TrainingError, match="of us contain NaN or infinity, first in sample 6000;"):
        check_finite(Examples(inputs=inputs, labels=labels), "us")
    check_finite(Examples(inputs=inputs[:6000], labels=labels[:6000]), "us")
    check_finite(Examples(inputs=labels, labels=labels), "us")


def test_os_error_is_attributed_to_the_task_and_storage_error_is_not() -> None:
    with (
        pytest.raises(
            TrainingError, match=r"task 't' failed for us: /gone: No such file or direct"
        ),
        blamed_on_task("t", "us"),
    ):
        open("/gone")  # noqa: PTH123, SIM115  # as tasks do
    with pytest.raises(StorageError), blamed_on_task("t", "us"):
        raise StorageError("our disk is full")
