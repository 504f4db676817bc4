import math
from typing import Any

import numpy as np
import pytest

from potluck.common.errors import ProtocolError, RunError, StorageError
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.server.select.interview import answers_of, read_scalars, stored_answers
from potluck.server.select.selection_checks import check_ask
from potluck.server.selection import Ask, Population, SelectionContext
from potluck.server.store.records import AttemptKey, Exchange

KEY = AttemptKey("run", 1, 1)


def scalars(**values: float) -> rpc.Answer:
    return rpc.Answer(scalars=rpc.Scalars(values=values))


def test_answer_values_are_returned_in_the_order_asked() -> None:
    assert read_scalars(scalars(b=2.0, a=-1.0), ["a", "b"]) == (-1.0, 2.0)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "no answer in time"),
        (rpc.Answer(), "the answer has no numbers"),
        (rpc.Answer(evaluation=rpc.EvaluationCounts()), "the answer has no numbers"),
        (scalars(), "the answer has 0 numbers, but a"),
        (scalars(b=1.0), "the answer has 1 numbers, but a"),
        (scalars(a=1.0, b=1.0), "the answer has 2 numbers, but a"),
        (scalars(a=math.nan), "the answer is nan"),
        (scalars(a=math.inf), "the answer is inf"),
        (rpc.Answer(failure=rpc.Failure(reason="R" * 999, message="m" * 999)), "m" * 300 + r" \("),
    ],
)
def test_answer_with_missing_or_invalid_values_is_refused(
    answer: rpc.Answer | None, why: str
) -> None:
    with pytest.raises(ProtocolError, match=why):
        read_scalars(answer, ["a"])


def test_stored_answers_are_read_back_unchanged() -> None:
    answers = stored_answers({"rows": [3, 1], "values": {"loss": [0.1, 0.2]}}, KEY)
    assert answers.rows.tolist() == [3, 1]
    assert answers.values["loss"].tolist() == [0.1, 0.2]
    empty = stored_answers({"rows": [], "values": {"loss": []}}, KEY)
    assert empty.rows.dtype == "int64"
    assert len(empty.values["loss"]) == 0


def test_stored_sum_is_not_returned_as_an_answer_of_a_client() -> None:
    asked = Exchange(
        step=1, question={"kind": "loss"}, answers={"rows": [2], "values": {"loss": [0.5]}}
    )
    summed = Exchange(
        step=2, question={"kind": "protocol", "sum": [2]}, answers={"rows": [2], "total": [7]}
    )
    open_still = Exchange(step=3, question={"kind": "loss"}, answers=None)
    [answers] = answers_of([asked, summed, open_still], KEY)
    assert answers.rows.tolist() == [2]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"rows": [1], "values": {"loss": []}},
        {"rows": [[1]], "values": {}},
        {"rows": [1], "values": [1]},
        {"rows": ["x"], "values": {}},
    ],
)
def test_damaged_stored_answers_are_refused(record: dict[str, object]) -> None:
    with pytest.raises(StorageError, match="restore the database"):
        stored_answers(record, KEY)


CONTEXT = SelectionContext(
    round=2,
    seed=0,
    count=2,
    population=Population(ids="abcd", classes=2, samples=np.ones(4, dtype=np.int64)),
    available=np.array([0, 1, 3]),
)


def test_valid_question_of_a_selector_is_accepted() -> None:
    check_ask(Ask(rows=np.array([3, 0]), kind="loss"), CONTEXT, "s")
    parameters: dict[str, bool | int | float | str] = {"x": 1, "y": 0.5, "z": "a", "on": True}
    ask = Ask(rows=np.array([1]), kind="context", names=("a", "b"), parameters=parameters)
    check_ask(ask, CONTEXT, "s")
    assert Ask(rows=np.array([1]), kind="loss").wanted == ("loss",)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rows": np.array([0, 2])}, "asks row 2, whose client is not available"),
        ({"rows": np.array([0, -1])}, "asks row -1, whose client is not available"),
        ({"rows": np.array([0, 0])}, "asks a client twice"),
        ({"rows": np.array([], dtype=np.int64)}, "asks an empty set of clients in round 2"),
        ({"rows": np.array([0.0])}, "not a one-dimensional array of integers"),
        ({"rows": np.array([[0]])}, "not a one-dimensional array of integers"),
        ({"rows": [0]}, "not a one-dimensional array of integers"),
        ({"kind": "Loss!"}, "asks for 'Loss!'"),
        ({"kind": 3}, "asks for 3"),
        ({"names": ("a", "")}, "words in lower case"),
        ({"names": ("a", "a")}, "different names"),
        ({"names": tuple(f"n{number}" for number in range(1025))}, "asks for 1025 numbers at once"),
        ({"parameters": {"x": math.nan}}, "with x = nan"),
        ({"parameters": {"x": None}}, "with x = None"),
        ({"parameters": {"x": [1]}}, r"with x = \[1\]"),
    ],
)
def test_invalid_question_is_refused_naming_the_selector(changes: dict[str, Any], why: str) -> None:
    values: dict[str, Any] = {"rows": np.array([0]), "kind": "loss", **changes}
    with pytest.raises(RunError, match=why) as caught:
        check_ask(Ask(**values), CONTEXT, "odd")
    assert caught.value.message.startswith("selector 'odd' ")


def test_selector_that_yields_a_value_other_than_a_question_is_refused() -> None:
    with pytest.raises(RunError, match="yielded a int; it must yield Ask"):
        check_ask(3, CONTEXT, "odd")
