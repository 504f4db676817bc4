import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.populations import context, facts_of, outcome, population, rounds, select

from potluck.common.errors import ConfigurationError
from potluck.server.selection import Selection, SelectionContext, UpdateFact
from potluck.server.selectors.oort import Oort
from potluck.server.selectors.pyramidfl import (
    PyramidFL,
    dropped_shares,
    gradient_utilities,
    passes,
    round_seconds,
)
from potluck.server.state import State

TENSORS = [f"{layer}.weight" for layer in range(10)]
BOTH = PyramidFL(prolong=True, drop=True, exploration=0.0)


def known(seconds: list[float], gradients: list[float]) -> State:
    """Return a state in which all clients were seen in round 1, with equal utilities."""
    clients = len(seconds)
    return State(
        scalars={"percentile": 100.0},
        arrays={
            "utility": np.ones(clients),
            "seconds": np.array(seconds),
            "last_seen": np.ones(clients, dtype=np.int64),
            "window": np.zeros(0),
            "gradient": np.array(gradients),
        },
    )


def chosen(state: State, count: int, *, number: int = 2, spares: int = 0) -> Selection:
    federation = population(len(state.arrays["seconds"]))
    given_context: SelectionContext = replace(
        context(federation, count, number=number), spares=spares, epochs=5, tensors=TENSORS
    )
    return select(BOTH, state, given_context)


def by_row(selection: Selection) -> dict[int, tuple[int, int]]:
    """Return (passes, number of tensors left out) of each client, by row."""
    assert selection.epochs is not None
    assert selection.dropped is not None
    told = zip(selection.epochs.tolist(), map(len, selection.dropped), strict=True)
    return dict(zip(selection.rows.tolist(), told, strict=True))


def test_number_of_passes_equals_the_worked_example() -> None:
    """A worked example: T = 100, t = 40, t_comp = 20, E = 5 make 4 times the epochs."""
    found = passes(np.array([40.0]), np.array([20.0]), 100.0, 5, longest=10.0)
    assert (found / 5).tolist() == [4.0]


def test_number_of_passes_lies_between_that_of_the_run_and_the_maximum() -> None:
    seconds = np.array([1e-6, 100.0, 101.0, np.nan, 99.0])
    assert passes(seconds, seconds, 100.0, 5, longest=10.0).tolist() == [55, 5, 5, 5, 5]
    assert passes(seconds, seconds, 100.0, 2, longest=0.0).tolist() == [2] * 5
    assert passes(seconds, seconds, -math.inf, 2, longest=10.0).tolist() == [2] * 5


def test_round_duration_is_that_of_the_slowest_client_not_spared() -> None:
    seconds = np.array([4.0, np.nan, 1.0, 3.0, 2.0])
    assert [round_seconds(seconds, last) for last in (0, 1, 3, 4, 5)] == [1.0, 1.0, 3.0, 4.0, 4.0]
    assert round_seconds(np.full(2, np.nan), 2) == -math.inf


def test_share_of_dropped_tensors_falls_with_the_update_utility() -> None:
    shares = dropped_shares(np.array([1.0, 9.0, np.nan, 4.0, 9.0]), 0.1, 0.6)
    np.testing.assert_allclose(shares, [0.6, 0.1, 0.0, 0.1 + 0.5 * 2 / 3, 0.1])
    assert dropped_shares(np.array([3.0]), 0.1, 0.6).tolist() == [0.1]
    assert dropped_shares(np.full(2, np.nan), 0.1, 0.6).tolist() == [0.0, 0.0]


def test_gradient_utilities_are_those_of_complete_updates() -> None:
    found = facts_of([[3.0, 4.0, 0.0], [0.0, 0.0, 4.0]])
    assert gradient_utilities(found).tolist() == pytest.approx([0.25, 0.2])
    partial = replace(found, shares=np.array([0.25, 1.0]))
    assert gradient_utilities(partial).tolist() == pytest.approx([0.5, 0.2])
    wild = replace(found, norms=np.array([np.nan, np.inf]))
    assert gradient_utilities(wild).tolist() == pytest.approx([0.0, 5e7])


def test_fast_clients_train_more_passes_and_low_utility_clients_drop_tensors() -> None:
    state = known([10.0, 20.0, 40.0, 40.0], [9.0, 1.0, 5.0, np.nan])
    told = by_row(chosen(state, 4))
    assert {row: epochs for row, (epochs, _) in told.items()} == {0: 20, 1: 10, 2: 5, 3: 5}
    left_out = {row: count for row, (_, count) in told.items()}
    assert left_out[3] == 0
    assert left_out[0] == 1
    assert left_out[1] == 6
    assert left_out[2] in (3, 4)  # a share of 0.35 of ten tensors
    reasons = dict(zip(chosen(state, 4).rows.tolist(), chosen(state, 4).reasons, strict=True))
    assert "has time for 20 passes; leaves out 1 of 10 tensors" in reasons[0]
    assert "passes" not in reasons[3]
    assert "tensors" not in reasons[3]


def test_passes_are_computed_without_the_spared_slowest_client() -> None:
    state = known([10.0, 20.0, 40.0, 4000.0], [1.0] * 4)
    told = by_row(chosen(state, 4, spares=1))
    assert {row: epochs for row, (epochs, _) in told.items()} == {0: 20, 1: 10, 2: 5, 3: 5}


@given(st.floats(0.1, 1.0), st.floats(0.0, 20.0))
def test_passes_converge_until_a_client_fills_the_round_duration(
    computing: float, way: float
) -> None:
    """Even with time for transfers, a client never takes longer than the slowest one."""
    federation, slowest, epochs = population(2), 40.0, 5
    state = known([way + computing, slowest], [1.0, 1.0])
    before = 0
    for number in range(2, 12):
        given_context = replace(
            context(federation, 2, number=number), epochs=epochs, tensors=TENSORS
        )
        selection = select(BOTH, state, given_context)
        assert selection.epochs is not None
        factors = selection.epochs / epochs
        usual = {0: (way, computing), 1: (0.0, slowest)}
        seconds = np.array(
            [
                usual[row][0] + usual[row][1] * factor
                for row, factor in zip(selection.rows.tolist(), factors, strict=True)
            ]
        )
        assert seconds.max() <= slowest * (1 + 1e-9)
        quick = int(selection.epochs[selection.rows.tolist().index(0)])
        assert quick >= before - 1
        before = quick
        ended = replace(outcome(number, selection, utility=[1.0, 1.0]), seconds=seconds)
        state = BOTH.observe(state, replace(ended, prolonged=factors))
    assert before == min(11 * epochs, math.floor((slowest - way) / computing * epochs)) or (
        way + computing * (before + 1) / epochs > slowest * 0.9
    )


def test_pyramidfl_without_options_selects_as_oort() -> None:
    federation = population(30)
    mine = [(s.rows.tolist(), s.reasons) for s in rounds(PyramidFL(), federation, 5, 8)]
    assert mine == [(s.rows.tolist(), s.reasons) for s in rounds(Oort(), federation, 5, 8)]
    [first] = rounds(PyramidFL(), federation, 5, 1)
    assert (first.epochs, first.dropped) == (None, None)


def test_pyramidfl_declares_the_needs_of_its_options() -> None:
    plain = PyramidFL()
    assert (plain.sets_epochs, plain.drops_tensors, plain.needs_facts) == (
        False,
        False,
        frozenset(),
    )
    assert (BOTH.sets_epochs, BOTH.drops_tensors, BOTH.needs_facts) == (
        True,
        True,
        frozenset({UpdateFact.NORM}),
    )


def test_only_tensor_of_a_model_is_never_dropped() -> None:
    state = known([10.0, 20.0], [1.0, 2.0])
    given_context = replace(context(population(2), 2, number=2), tensors=["0.weight"])
    selection = select(PyramidFL(drop=True, most_dropped=1.0), state, given_context)
    assert selection.dropped == [[], []]


def test_minimum_drop_share_above_the_maximum_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="swap them"):
        PyramidFL(least_dropped=0.7)
