"""FedConcat's two phases, with clients as functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.strategy_rounds import Rounds, Sent

from potluck.common.errors import ConfigurationError
from potluck.common.tensors.layout import Layout
from potluck.server.selection import Population
from potluck.server.state import State
from potluck.server.strategies.fedconcat import FedConcat, distributions

Arrays = Mapping[str, NDArray[Any]]


def model(value: float = 0.0, **others: float) -> Arrays:
    """Return a model of two groups, in which every tensor is one number."""
    names = ("encoders.0.w", "encoders.1.w", "heads.0.w", "heads.1.w", "head.w")
    values = {name: others.get(name.replace(".", "_"), value) for name in names}
    arrays: dict[str, NDArray[Any]] = {n: np.array([v], np.float32) for n, v in values.items()}
    return {**arrays, "joined": np.array(0, np.int64)}


def population(counts: Mapping[str, list[float]]) -> Population:
    rows = np.array(list(counts.values()), float)
    return Population(
        ids=list(counts),
        classes=rows.shape[1],
        samples=np.nan_to_num(rows).sum(axis=1).astype(np.int64),
        label_counts=rows,
    )


TWO_KINDS = {"a": [9.0, 1.0], "b": [80.0, 10.0], "c": [1.0, 9.0], "d": [0.0, 5.0]}


def enrolled(strategy: FedConcat, state: State | None = None, **more: list[float]) -> State:
    found = strategy.init(model()) if state is None else state
    return strategy.enrol(found, population({**TWO_KINDS, **more}), seed=3)


def groups_of(strategy: FedConcat, state: State, clients: str) -> list[int | None]:
    return [strategy.part(state, client) for client in clients]


def test_clients_with_similar_labels_stay_in_one_group() -> None:
    strategy = FedConcat(groups=2, rounds=5)
    state = enrolled(strategy)
    of_a, of_b, of_c, of_d = groups_of(strategy, state, "abcd")
    assert of_a == of_b != of_c == of_d
    again = enrolled(strategy)
    assert groups_of(strategy, again, "abcd") == [of_a, of_b, of_c, of_d], "a kill before a commit"
    late = enrolled(strategy, state, e=[0.0, 3.0], f=[7.0, 0.0], g=[np.nan, np.nan])
    assert groups_of(strategy, late, "abcdef") == [of_a, of_b, of_c, of_d, of_c, of_a]
    assert groups_of(strategy, late, "g") == [0], "nothing is known of it"
    moved = strategy.enrol(late, population({**TWO_KINDS, "a": [0.0, 9.0]}), seed=3)
    assert strategy.part(moved, "a") == of_a


def test_groups_are_made_again_while_clients_are_fewer_than_groups() -> None:
    strategy = FedConcat(groups=2, rounds=5)
    first = strategy.enrol(strategy.init(model()), population({"a": TWO_KINDS["a"]}), seed=3)
    assert groups_of(strategy, first, "a") == [0]
    of_a, of_b, of_c, of_d = groups_of(strategy, enrolled(strategy, first), "abcd")
    assert of_a == of_b != of_c == of_d


def test_negative_noisy_label_counts_are_treated_as_zero() -> None:
    found = distributions(np.array([[-3.0, 4.0], [-1.0, -2.0], [1.0, 3.0]]))
    assert found.tolist() == [[0, 1], [0.5, 0.5], [0.25, 0.75]]


def played(folder: Path, strategy: FedConcat) -> tuple[Rounds, dict[str, int]]:
    rounds = Rounds(strategy, model(), folder)
    rounds.state = enrolled(strategy, rounds.state)
    parts = dict(zip("abcd", groups_of(strategy, rounds.state, "abcd"), strict=True))
    return rounds, {client: part or 0 for client, part in parts.items()}


def test_each_group_averages_its_encoder_and_then_all_clients_train_the_head(
    tmp_path: Path,
) -> None:
    strategy = FedConcat(groups=2, rounds=2)
    rounds, part = played(tmp_path, strategy)
    own, other = part["a"], part["c"]
    rounds.play(
        {
            "a": Sent(weights=model(1.0), samples=1),
            "b": Sent(weights=model(4.0), samples=2),
            "c": Sent(weights=model(10.0), samples=7),
        }
    )
    found = {name: float(np.ravel(array)[0]) for name, array in rounds.model.items()}
    assert found[f"encoders.{own}.w"] == found[f"heads.{own}.w"] == pytest.approx(3.0)
    assert found[f"encoders.{other}.w"] == found[f"heads.{other}.w"] == pytest.approx(10.0)
    assert found["head.w"] == found["joined"] == 0.0

    before = found[f"encoders.{other}.w"]
    rounds.play({"a": Sent(weights=model(5.0))})
    assert float(rounds.model[f"encoders.{own}.w"][0]) == pytest.approx(5.0)
    assert float(rounds.model[f"encoders.{other}.w"][0]) == before, "none of its clients took part"

    assert groups_of(strategy, rounds.state, "abc") == [2, 2, 2]
    rounds.play(
        {"a": Sent(weights=model(1.0), samples=1), "c": Sent(weights=model(3.0), samples=9)}
    )
    assert float(rounds.model["head.w"][0]) == pytest.approx(2.0), "all count alike"
    assert float(rounds.model[f"encoders.{own}.w"][0]) == pytest.approx(5.0)
    assert int(rounds.model["joined"]) == 1


@pytest.mark.parametrize(
    "tensors",
    [
        {"w": np.zeros(1, np.float32)},
        {n: a for n, a in model().items() if n != "joined"},
        {**model(), "encoders.2.w": np.zeros(1, np.float32)},
    ],
    ids=["another model", "no head", "more groups"],
)
def test_fedconcat_refuses_an_incompatible_model_with_the_remedy(tensors: Arrays) -> None:
    FedConcat(groups=2).check_model(Layout.of(model()))
    with pytest.raises(
        ConfigurationError, match=r'set \[model\] name = "concatenation", groups = 2'
    ):
        FedConcat(groups=2).check_model(Layout.of(tensors))
