"""DC selection by the sums and distances of its paper, without a federation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from support.populations import context, labelled, population, select

from potluck.client.question import QuestionContext
from potluck.client.training.questions.label_distance import LabelDistance
from potluck.common.errors import ConfigurationError, RunError
from potluck.common.learning.step_by_step import LABEL_DISTANCE
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples
from potluck.server.selection import (
    Answers,
    Ask,
    AskSum,
    Population,
    Selection,
    SelectionContext,
    Selector,
    Summed,
)
from potluck.server.selectors.dc import DcBalanced, DcReal
from potluck.server.state import State

Counts = NDArray[np.int64]
FIVE = [[1, 3, 0], [5, 1, 4], [1, 0, 1], [2, 1, 1], [1, 0, 1]]


def told(counts: Counts, ask: Ask) -> dict[int, float]:
    """Return the answers of clients with these label counts, by row."""
    found = {}
    for row in ask.rows.tolist():
        labels = torch.repeat_interleave(
            torch.arange(counts.shape[1]), torch.tensor(counts[row].tolist())
        )
        question = QuestionContext(
            client=ClientId(f"k{row}"),
            round=1,
            data=ClientData(train=Examples(inputs=torch.ones(len(labels), 1), labels=labels)),
            classes=counts.shape[1],
            groups=0,
            device=torch.device("cpu"),
            model=None,
        )
        found[row] = LabelDistance(**ask.parameters).answer(question)[LABEL_DISTANCE]  # type: ignore[arg-type]
    return found


def interviewed(
    selector: Selector,
    given: SelectionContext,
    counts: Counts,
    *,
    sums: bool = True,
    tell: Callable[[Counts, Ask], dict[int, float]] = told,
) -> tuple[Selection, list[Ask | AskSum]]:
    """Return the selection, and the questions and sums that the selector asked for."""
    choosing = selector.select(State(), given)
    assert not isinstance(choosing, Selection)
    asked: list[Ask | AskSum] = []
    reply: Any = None
    while True:
        try:
            ask = choosing.send(reply)
        except StopIteration as ended:
            selection: Selection = ended.value
            return selection, asked
        asked.append(ask)
        if isinstance(ask, AskSum):
            total = counts[ask.rows].sum(axis=0)
            reply = Summed(rows=ask.rows, total=total) if sums else None
        else:
            numbers = tell(counts, ask)
            rows = np.array(list(numbers), dtype=np.int64)
            reply = Answers(rows=rows, values={LABEL_DISTANCE: np.array(list(numbers.values()))})


def with_total(counts: Counts) -> Population:
    total = counts.sum(axis=0).astype(np.float64)
    return Population(
        ids=[f"k{row}" for row in range(len(counts))],
        classes=counts.shape[1],
        samples=np.zeros(len(counts), np.int64),
        label_totals=total,
    )


@settings(max_examples=60, deadline=None)
@given(
    counts=hnp.arrays(
        np.int64, st.tuples(st.integers(3, 9), st.just(3)), elements=st.integers(0, 9)
    ),
    seed=st.integers(0, 50),
    stop_early=st.booleans(),
    real=st.booleans(),
)
def test_dc_protocol_selects_as_a_coordinator_that_knows_all_label_counts(
    counts: Counts, seed: int, stop_early: bool, real: bool
) -> None:
    selector = (DcReal if real else DcBalanced)(added=2, stop_early=stop_early)
    count = min(4, len(counts))
    counts[counts.sum(axis=1) == 0, 0] = 1  # only known counts show that a client has no samples
    federation = labelled(counts.tolist())
    alone = select(selector, State(), context(federation, count, seed=seed))
    given_ = context(with_total(counts), count, seed=seed)
    found, asked = interviewed(selector.by_protocol(), given_, counts)
    assert found.rows.tolist() == alone.rows.tolist()
    sums = [ask for ask in asked if isinstance(ask, AskSum)]
    assert len(sums) == len(asked) - len(sums)
    sizes = [len(ask.rows) for ask in sums]
    assert sizes == list(range(sizes[0], sizes[0] + len(sizes))) if sizes else True


def test_dc_protocol_draws_the_remaining_clients_without_a_sum_or_answers() -> None:
    counts = np.array(FIVE)
    selector = DcBalanced(added=2).by_protocol()
    federation = population(5, classes=3)
    no_sum, asked = interviewed(selector, context(federation, 4), counts, sums=False)
    assert len(no_sum.rows) == 4
    assert len(asked) == 1
    assert "could not be summed" in no_sum.reasons[-1]
    silent, _ = interviewed(selector, context(federation, 4), counts, tell=lambda *_: {})
    assert len(silent.rows) == 4
    assert "no client sent" in silent.reasons[-1]


@pytest.mark.parametrize("lie", [-0.5, 1.5, -1e9])
def test_client_with_an_impossible_distance_is_not_added(lie: float) -> None:
    counts, liar = np.array(FIVE), 4

    def lying(counts: Counts, ask: Ask) -> dict[int, float]:
        return {row: lie if row == liar else number for row, number in told(counts, ask).items()}

    for seed in range(20):
        given_ = context(population(5, classes=3), 4, seed=seed)
        found, asked = interviewed(DcBalanced(added=2).by_protocol(), given_, counts, tell=lying)
        [first, *_] = [ask for ask in asked if isinstance(ask, AskSum)]
        assert liar not in found.rows or liar in first.rows


def test_dc_real_without_the_sum_of_label_counts_is_refused() -> None:
    with pytest.raises(RunError, match="no sum of the federation's label counts"):
        interviewed(DcReal().by_protocol(), context(population(5, classes=3), 4), np.array(FIVE))


@pytest.mark.parametrize("text", ["", "1 x", "1 -2", f"{1 << 53}", "1,2"])
def test_label_distance_with_invalid_vectors_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="'active' is"):
        LabelDistance(active=text, target="1 1")


def test_label_distance_over_a_wrong_number_of_classes_is_refused() -> None:
    ask = Ask(
        rows=np.array([0]), kind=LABEL_DISTANCE, parameters={"active": "1 2", "target": "1 1 1"}
    )
    with pytest.raises(
        ConfigurationError, match="'active' has 2 numbers, but the task has 3 classes"
    ):
        told(np.array(FIVE), ask)
