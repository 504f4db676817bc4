import numpy as np
from support.populations import context, outcome, population, rounds, select

from potluck.server.selectors.round_robin import RoundRobin


def test_round_robin_selects_every_client_equally_often() -> None:
    """With 24 clients and 9 per round, counts differ by at most 1; after eight rounds all are 3."""
    times = np.zeros(24, dtype=np.int64)
    for number, selection in enumerate(rounds(RoundRobin(), population(24), 9, 40), start=1):
        assert len(set(selection.rows.tolist())) == 9
        times[selection.rows] += 1
        assert times.max() - times.min() <= 1
        if number == 8:
            assert (times == 3).all()


def test_round_robin_order_among_equal_counts_is_random() -> None:
    first = {
        next(rounds(RoundRobin(), population(24), 1, 1, seed=seed)).rows[0] for seed in range(200)
    }
    assert len(first) == 24


def test_failed_selection_counts_as_a_selection_of_round_robin() -> None:
    """A client that is never included is not picked again before its turn."""
    selector, federation = RoundRobin(), population(4)
    state = selector.init(federation)
    selection = select(selector, state, context(federation, 2))
    ended = outcome(1, selection)
    failed = type(ended)(
        round=1, selected=ended.selected, included=ended.selected[:0], seconds=ended.seconds
    )
    state = selector.observe(state, failed)
    second = select(selector, state, context(federation, 2, number=2))
    assert not set(second.rows.tolist()) & set(selection.rows.tolist())


def test_reconnected_client_catches_up_by_one_selection_per_round() -> None:
    selector, federation = RoundRobin(), population(4)
    state = selector.init(federation)
    for number in range(1, 13):
        away = number <= 6
        available = np.arange(3 if away else 4)
        given = context(federation, 2, number=number, available=available)
        selection = select(selector, state, given)
        if 7 <= number <= 10:
            assert selection.rows.tolist().count(3) == 1
        state = selector.observe(state, outcome(number, selection))
    assert state.arrays["selections"].max() - state.arrays["selections"].min() <= 1


def test_client_that_joins_later_is_appended_to_the_selection_counts() -> None:
    selector = RoundRobin()
    state = selector.init(population(2))
    grown = population(5)
    selection = select(selector, state, context(grown, 5))
    assert sorted(selection.rows.tolist()) == [0, 1, 2, 3, 4]
    state = selector.observe(state, outcome(1, selection))
    assert state.arrays["selections"].tolist() == [1] * 5


def test_round_robin_reasons_give_the_number_of_earlier_selections() -> None:
    reasons = [s.reasons[0] for s in rounds(RoundRobin(), population(1), 1, 4)]
    assert reasons == [
        "never selected before",
        "selected once before",
        "selected twice before",
        "selected 3 times before",
    ]
