"""Selection without a federation: checked as in a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from potluck.common.errors import RunError
from potluck.deploy.operator.offline_selection import select_offline
from potluck.server.selection import Population, Selection, SelectionContext, Selector
from potluck.server.state import State

POPULATION = Population(
    ids=["a", "b", "c"],
    classes=2,
    samples=np.array([4, 4, 4]),
    label_counts=np.array([[4.0, 0.0], [2.0, 2.0], [0.0, 4.0]]),
)


class Given(Selector):
    """Selector that returns given rows and given reasons."""

    def __init__(self, rows: Sequence[int], reasons: int | None = None) -> None:
        self._rows, self._reasons = rows, len(rows) if reasons is None else reasons

    def select(self, state: State, context: SelectionContext) -> Selection:
        return Selection(rows=np.array(self._rows), reasons=["given"] * self._reasons)


class Careless(Selector):
    """Selector that reads label counts without declaring that it needs them."""

    def select(self, state: State, context: SelectionContext) -> Selection:
        counts: Any = context.population.label_counts
        return Selection(rows=counts.argsort()[:1], reasons=["most even"])


def select(selector: Selector) -> list[list[int]]:
    rounds = select_offline(selector, POPULATION, "mine", rounds=1, count=2, seed=1)
    return [each.selection.rows.tolist() for each in rounds]


def test_valid_offline_selection_is_returned() -> None:
    assert select(Given([2, 0])) == [[2, 0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Given([1, 1]), "selector 'mine' chose a client twice"),
        (lambda: Given([0, 1, 2]), "selector 'mine' chose 3 clients, but the run requests 2"),
        (
            lambda: Given([0, 1], reasons=1),
            "selector 'mine' must return one reason for each chosen client",
        ),
        (lambda: Given([7]), "selector 'mine' chose row 7, whose client is not available"),
        (Careless, r"selector 'mine' failed in select: AttributeError: .*test_offline_selection"),
    ],
)
def test_invalid_offline_selection_is_refused_as_in_a_run(
    make: Callable[[], Selector], message: str
) -> None:
    with pytest.raises(RunError, match=message):
        select(make())
