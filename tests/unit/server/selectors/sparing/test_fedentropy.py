import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.populations import context, outcome, population, select

from potluck.server.selection import Offers, RoundOutcome
from potluck.server.selectors.sparing.fedentropy import FedEntropy
from potluck.server.state import State


def offers(labels: list[list[float]], samples: list[int] | None = None) -> Offers:
    table = np.array(labels, dtype=np.float64)
    return Offers(
        rows=np.arange(len(table)),
        values={f"class-{number}": column for number, column in enumerate(table.T)},
        samples=np.array(samples or [10] * len(table)),
    )


def entropy(labels: np.ndarray, samples: np.ndarray) -> float:
    mix = (labels * samples[:, None]).sum(axis=0)
    shares = mix[mix > 0] / mix.sum()
    return float(-(shares * np.log2(shares)).sum())


def test_fedentropy_spares_the_client_of_the_worked_example() -> None:
    labels = [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.75, 0.15, 0.1], [0.1, 0.1, 0.8]]
    table = np.array(labels)
    assert entropy(table, np.full(4, 10)) == pytest.approx(1.5510, abs=5e-5)
    assert entropy(np.delete(table, 2, axis=0), np.full(3, 10)) == pytest.approx(1.58496, abs=5e-6)
    spared = FedEntropy().spare(State(), offers(labels))
    assert spared.rows.tolist() == [2]
    assert spared.reasons == ["without it the labels' entropy is 0.034 bits higher"]


@given(
    st.integers(1, 7).flatmap(
        lambda n: st.lists(
            st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda row: sum(row) > 0.01),
            min_size=n,
            max_size=n,
        )
    ),
    st.data(),
)
def test_each_spared_client_raises_the_label_entropy_most(
    labels: list[list[float]], data: st.DataObject
) -> None:
    samples = data.draw(st.lists(st.integers(1, 1000), min_size=len(labels), max_size=len(labels)))
    table, sizes = np.array(labels), np.array(samples, dtype=np.float64)
    table = table / table.sum(axis=1, keepdims=True)
    left = list(range(len(labels)))
    for row in FedEntropy().spare(State(), offers(labels, samples)).rows.tolist():
        now = entropy(table[left], sizes[left])
        without = {
            each: entropy(table[rest], sizes[rest])
            for each in left
            if (rest := [other for other in left if other != each])
        }
        assert without[row] > now
        assert without[row] == pytest.approx(max(without.values()), abs=1e-9)
        left.remove(row)
    assert left


@given(
    st.lists(
        st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=4, max_size=4),
        min_size=1,
        max_size=9,
    )
)
def test_fedentropy_spares_fewer_than_all_clients_for_any_reported_labels(
    labels: list[list[float]],
) -> None:
    spared = FedEntropy().spare(State(), offers(labels, [0] * len(labels)))
    assert len(set(spared.rows.tolist())) == len(spared.rows) < len(labels)


def after(selector: FedEntropy, spared: list[int]) -> State:
    given = context(population(6), 6)
    state = selector.init(population(6))
    chosen = select(selector, state, given)
    ended = outcome(1, chosen)
    rows = np.array(spared, dtype=np.int64)
    included = np.setdiff1d(ended.included, [*spared, 5])
    return selector.observe(
        state,
        RoundOutcome(
            round=1, selected=chosen.rows, included=included, seconds=ended.seconds, spared=rows
        ),
    )


def test_selection_weights_rise_for_used_clients_and_fall_for_spared_ones() -> None:
    state = after(FedEntropy(), [1, 2])
    # Client 5 failed and keeps weight 1.
    assert state.arrays["weights"].tolist() == [2.0, 0.5, 0.5, 2.0, 2.0, 1.0]


def test_client_with_a_larger_weight_is_drawn_more_often() -> None:
    selector = FedEntropy(exploration=0.0)
    state = State(arrays={"weights": np.array([8.0, 1.0, 1.0])})
    first = [
        select(selector, state, context(population(3), 1, number=number)).rows[0]
        for number in range(1, 1001)
    ]
    assert first.count(0) == pytest.approx(800, abs=50)


def test_pool_grouping_draws_used_clients_before_spared_ones() -> None:
    state = after(FedEntropy(grouping="pools"), [1, 2])
    assert state.arrays["weights"].tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    for number in range(1, 9):
        given = context(population(6), 2, number=number)
        wanted = select(FedEntropy(grouping="pools", exploration=0.0), state, given)
        assert set(wanted.rows.tolist()) <= {0, 3, 4, 5}
        spared = select(FedEntropy(grouping="pools", exploration=1.0), state, given)
        assert set(spared.rows.tolist()) == {1, 2}
    many = select(FedEntropy(grouping="pools", exploration=1.0), state, context(population(6), 5))
    assert len(many.rows) == 5
    assert set(many.rows[:2].tolist()) == {1, 2}
