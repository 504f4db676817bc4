"""When a run stops early, and which of its models is best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from potluck.server.plan.stopping import StopRule
from potluck.server.store.records import BestSoFar

UP: dict[str, Any] = {"measure": "accuracy", "higher_is_better": True}
DOWN: dict[str, Any] = {"measure": "loss", "higher_is_better": False}


def run(rule: StopRule, values: Sequence[float | None]) -> tuple[BestSoFar | None, int, str]:
    """Return the best so far, the last round and why it was the last. values: of rounds 1, 2, …"""
    best: BestSoFar | None = None
    for number, value in enumerate(values, 1):
        best = rule.after(best, number, value)
        if why := rule.why_over(best):
            return best, number, why
    return best, len(values), ""


@pytest.mark.parametrize(
    ("settings", "values", "best", "last"),
    [
        ({**UP, "patience": 2}, [0.5, 0.6, 0.6, 0.5, 0.9], 2, 4),  # an equal value is not better
        ({**UP, "patience": 2}, [0.5, 0.4, 0.6, 0.5, 0.7], 5, 5),
        ({**DOWN, "patience": 2}, [2.0, 1.0, 1.5, 1.0, 0.1], 2, 4),
        # A step below minimum_delta makes a better model, but doesn't prolong the run.
        ({**UP, "patience": 3, "minimum_delta": 0.1}, [0.5, 0.54, 0.58, 0.59, 0.9], 4, 4),
        ({**UP, "patience": 3, "minimum_delta": 0.1}, [0.5, 0.54, 0.58, 0.61, 0.6], 4, 5),
        ({**UP, "target": 0.8}, [0.5, 0.8, 0.9], 2, 2),
        ({**DOWN, "target": 0.8}, [2.0, 1.0, 0.7, 0.6], 3, 3),
        ({**UP, "target": 0.8, "patience": 1}, [0.5, 0.5, 0.9], 1, 2),
        ({**UP, "patience": 2}, [0.5, None, math.nan, 0.9], 1, 3),
        ({**UP, "patience": 2}, [None, 0.5, None, 0.6], 4, 4),
        ({**DOWN, "patience": 2}, [math.inf, 3.0, math.inf, 2.0], 4, 4),
        ({**UP}, [0.5, 0.9, 0.1, 0.1, 0.1, 0.1], 2, 6),  # no patience, no target: never stops
        # Rounds of the opening never count, whatever their values.
        ({**UP, "patience": 2, "opening": 3}, [0.9, 0.8, 0.7, 0.2, 0.1, 0.1, 0.9], 4, 6),
        ({**UP, "target": 0.8, "opening": 3}, [0.9, 0.9, 0.9, 0.2, 0.8], 5, 5),
    ],
)
def test_stop_rule_finds_the_best_and_the_last_round(
    settings: dict[str, Any], values: list[float | None], best: int, last: int
) -> None:
    found, ended, _ = run(StopRule(**settings), values)
    assert found is not None
    assert (found.round, ended) == (best, last)
    assert found.value == values[best - 1]


def test_stop_reason_names_the_metric_and_the_limit_reached() -> None:
    _, _, reached = run(StopRule(**UP, target=0.8), [0.5, 0.8125])
    assert reached == "stopped early: accuracy is 0.8125 in round 2, and stop.target 0.8"
    _, _, plateau = run(StopRule(**DOWN, patience=1, minimum_delta=0.5), [2.0, 1.75])
    assert plateau == (
        "stopped early: loss has not improved by more than 0.5 in 1 evaluation; its best is 1.75 "
        "in round 2"
    )
    _, _, flat = run(StopRule(**UP, patience=2), [0.5, 0.5, 0.5])
    assert flat == (
        "stopped early: accuracy has not improved in 2 evaluations; its best is 0.5 in round 1"
    )
    best, last, never = run(StopRule(**UP, patience=2), [None] * 5)
    assert (last, never) == (2, "stopped early: accuracy was not measured in 2 evaluations")
    assert best is not None
    assert best.round is None


def test_stop_rule_resumed_from_stored_state_gives_the_same_result() -> None:
    rule = StopRule(**UP, patience=3, minimum_delta=0.01)
    values = [0.1, 0.3, None, 0.305, 0.31, 0.32, 0.1, 0.325, 0.2]
    whole = run(rule, values)
    for killed_after in range(1, whole[1]):
        stored, _, _ = run(rule, values[:killed_after])
        best, number = stored, killed_after
        while not rule.why_over(best):
            number += 1
            best = rule.after(best, number, values[number - 1])
        assert (best, number, rule.why_over(best)) == whole
