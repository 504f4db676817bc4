"""The selector's judgement of updates: allowed values, and errors that name the selector."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
from support.populations import context, facts, population

from potluck.common.errors import RunError
from potluck.server.reduce.judging import UpdatesSeen, judged
from potluck.server.selection import (
    Floats,
    Judgement,
    MeasureMean,
    Selection,
    SelectionContext,
    Selector,
    UpdateFacts,
)
from potluck.server.state import State

GIVEN = facts(np.array([4, 7, 2]))


class Says(Selector):
    """Selector that judges with what it was created with: a judgement or a generator function."""

    def __init__(self, said: Any) -> None:
        self._said = said

    def select(self, state: State, context: SelectionContext) -> Selection:
        return Selection(rows=context.available, reasons=["x"] * len(context.available))

    def judge(self, state: State, facts: UpdateFacts) -> Any:
        return self._said() if callable(self._said) else self._said


def judge(said: Any, losses: Sequence[float] = ()) -> tuple[Judgement, list[Any]]:
    left, asked = iter(losses), []

    def loss_of_mean(places: Sequence[int], weights: Floats) -> float:
        asked.append((list(places), weights.tolist()))
        return next(left)

    return judged(Says(said), "says", State(), GIVEN, loss_of_mean), asked


def test_selector_excludes_no_update_by_default() -> None:
    class Silent(Says):
        judge = Selector.judge

    found = judged(Silent(None), "silent", State(), GIVEN, lambda places, weights: 0.0)
    assert (found.set_aside, found.values) == ({}, {})


def test_selector_measures_means_of_updates_with_weights_that_sum_to_1() -> None:
    def asking() -> Generator[MeasureMean, float, Judgement]:
        one = yield MeasureMean(rows=np.array([2, 4]))
        two = yield MeasureMean(rows=np.array([7, 2]), weights=np.array([3.0, 1.0]))
        none = yield MeasureMean(rows=np.array([], dtype=np.int64))
        return Judgement(set_aside={7: "worse"}, values={"losses": np.array([one, two, none])})

    found, asked = judge(asking, [0.5, np.inf, 2.0])
    assert asked == [([2, 0], [0.5, 0.5]), ([1, 2], [0.75, 0.25]), ([], [])]
    assert found.values["losses"].tolist() == [0.5, np.inf, 2.0]
    assert found.set_aside == {7: "worse"}


def yields(said: Any) -> Any:
    def asking() -> Generator[Any, float, Judgement]:
        yield said
        return Judgement()

    return asking


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (Judgement(set_aside={5: "x"}), "'says' excludes row 5, whose client has sent no update"),
        (Judgement(set_aside={4: "x", 7: "x", 2: "x"}), "'says' excludes all 3 updates of round 1"),
        ("nonsense", "'says' returned a str from `judge`; it must return"),
        (yields("nonsense"), "'says' yielded a str from `judge`; it must yield"),
        (yields(MeasureMean(rows=np.array([3]))), r"'says' requests the mean of the rows \[3\]"),
        (yields(MeasureMean(rows=np.array([2, 2]))), r"the mean of the rows \[2, 2\]"),
        (
            yields(MeasureMean(rows=np.array([2]), weights=np.array([0.0]))),
            r"mean of 1 updates with the weights \[0.0\]",
        ),
    ],
)
def test_invalid_judgement_is_refused_naming_the_selector(said: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        judge(said, [1.0])


def test_excluded_rows_are_mapped_to_the_clients_that_sent_the_updates() -> None:
    seen = UpdatesSeen(state=State(), places={"a": 4, "b": 7, "c": 2})
    assert seen.rows.tolist() == [4, 7, 2]
    assert seen.clients({7: "x", 9: "y"}) == ["b"]


def test_judgement_and_selection_draw_from_different_random_streams() -> None:
    first = GIVEN.generator("says").random(), GIVEN.generator("says").random()
    assert first[0] == first[1] != context(population(3), 2).generator("says").random()
