"""Choice between training clients together and one by one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from potluck.client.training.lanes.lane_choice import (
    LaneChoice,
    LaneChoices,
    fastest,
    measured,
    subject_of,
)
from potluck.client.training.lanes.lane_steps import LaneRules
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.common.settings.local_training import LocalTraining

RULES = LaneRules(settings=LocalTraining(batch_size=8), mu=0.0, round=1)


def choice(alone: float = 2.0, together: float = 1.0) -> LaneChoice:
    return LaneChoice(subject="it", alone_seconds=alone, together_seconds=together)


def unmeasured() -> LaneChoice:
    raise AssertionError("it was measured again")


def test_faster_training_method_is_chosen_with_the_reason() -> None:
    assert choice().together
    assert not choice(together=3.0).together
    assert choice(together=3e-6, alone=2e-6).reason == (
        "a step takes 2 µs per client if clients train alone, and 3 µs in a batched step"
    )


def test_first_lane_choice_is_stored_for_all_processes(tmp_path: Path) -> None:
    first, second, third = (LaneChoices(tmp_path) for _ in range(3))
    assert first.of("it", choice) == choice()
    assert second.of("it", unmeasured) == choice()
    [path] = tmp_path.iterdir()
    path.write_text("half a fi")
    assert first.of("it", unmeasured) == choice()
    assert third.of("it", lambda: choice(together=3.0)) == choice(together=3.0)
    assert LaneChoices(tmp_path).of("it", unmeasured) == choice(together=3.0)


def test_concurrent_measurement_uses_the_choice_stored_first(tmp_path: Path) -> None:
    one, other = LaneChoices(tmp_path), LaneChoices(tmp_path)

    def while_the_other_measures() -> LaneChoice:
        other.of("it", choice)
        return choice(together=3.0)

    assert one.of("it", while_the_other_measures) == choice()


def test_lane_choice_is_stored_on_a_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert LaneChoices(tmp_path).of("it", choice) == choice()
    assert LaneChoices(tmp_path).of("it", unmeasured) == choice()
    assert len(list(tmp_path.iterdir())) == 1


def test_processes_with_the_same_pid_do_not_overwrite_each_others_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers that share a folder can have such processes."""
    link, other = os.link, LaneChoices(tmp_path)

    def overtaken(mine: Path, path: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        assert other.of("it", lambda: choice(together=3.0)) == choice(together=3.0)
        link(mine, path)

    monkeypatch.setattr(os, "link", overtaken)
    assert LaneChoices(tmp_path).of("it", choice) == choice(together=3.0)
    assert LaneChoices(tmp_path).of("it", unmeasured) == choice(together=3.0)


def test_batched_and_separate_steps_are_both_measured() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    sample, device = torch.zeros(1, 4), torch.device("cpu")
    subject = subject_of(model, sample, RULES, device)
    found = measured(subject, model, sample, CrossEntropy(), RULES, classes=3, device=device)
    assert found.subject == subject
    assert min(found.alone_seconds, found.together_seconds) > 0
    wider = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    assert subject_of(wider, sample, RULES, device) != subject


def test_measurement_disturbed_by_other_load_is_repeated() -> None:
    """After three measurements each, the slower method has the lowest time."""
    fast, slow = iter([4.0, 9.0, 2.1, *[1.0] * 9]), iter([8.0, 2.0, 2.2, *[2.0] * 9])
    assert fastest(lambda: next(fast), lambda: next(slow)) == (1.0, 2.0)
    assert len(list(fast)) == len(list(slow)) == 3, "nine of each are enough, however near"


def test_clear_difference_needs_three_measurements() -> None:
    fast, slow = iter([1.0, 1.1, 1.2, 0.1]), iter([2.0, 1.9, 2.2])
    assert fastest(lambda: next(fast), lambda: next(slow)) == (1.0, 1.9)


@pytest.mark.parametrize("batched", [1, 0, "sometimes"])
def test_batched_setting_other_than_boolean_or_auto_is_refused(batched: object) -> None:
    with pytest.raises(ValueError, match="batched"):
        LocalTraining.model_validate({"batched": batched})
