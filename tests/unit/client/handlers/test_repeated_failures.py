"""Hosts whose trainings all fail in the same way."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from potluck.client.handlers.repeated_failures import RepeatedFailures
from potluck.common.errors import DataError, StateLostError, TrainerError, TrainingError


def failure(client: str, text: str = "ImportError: partially initialized") -> TrainerError:
    return TrainerError(f"the trainer of task 'x' failed for client '{client}': {text}")


def test_the_third_failure_of_one_cause_excludes_the_client() -> None:
    failures = RepeatedFailures()
    with capture_logs() as logs:
        found = [failures.note(failure(each), each) for each in ("ward-a", "ward-b", "lab", "a")]
    assert [each is None for each in found] == [True, True, False, False]
    third = found[2]
    assert third is not None
    assert third.permanent
    assert third.message == (
        "the last 3 trainings of this host failed in the same way: the trainer of task 'x' failed "
        "for client 'lab': ImportError: partially initialized; correct the cause, and "
        "restart the host"
    )
    assert [(each["log_level"], each["trainings"]) for each in logs] == [("error", 3), ("error", 4)]


def test_failures_that_differ_only_in_numbers_have_the_same_cause() -> None:
    failures = RepeatedFailures()
    texts = ["loss 0.31 at step 7", "loss 1.5 at step 12", "loss 9.0 at step 1"]
    found = [failures.note(failure("client-1", text), "client-1") for text in texts]
    assert found[-1] is not None


def test_success_or_different_cause_resets_the_failure_count() -> None:
    failures = RepeatedFailures()
    for _ in range(2):
        assert failures.note(failure("a"), "a") is None
    failures.note_success()
    for _ in range(2):
        assert failures.note(failure("a"), "a") is None
    assert failures.note(failure("a", "ValueError: empty"), "a") is None
    assert failures.note(failure("a"), "a") is None


@pytest.mark.parametrize("error", [StateLostError("gone"), DataError("labels")])
def test_failures_that_the_coordinator_handles_are_not_counted(error: TrainingError) -> None:
    failures = RepeatedFailures()
    assert [failures.note(error, "a") for _ in range(4)] == [None] * 4
