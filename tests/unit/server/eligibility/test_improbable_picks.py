from collections.abc import Sequence

import numpy as np
from support.populations import population, rounds

from potluck.server.eligibility.picks import Picks, improbable_picks
from potluck.server.selectors.uniform import Uniform


def found(picks: Sequence[int] | Picks, mean: float) -> list[int]:
    rows = improbable_picks(np.array(picks), np.full(len(picks), mean))
    return [int(row) for row in rows]


def test_equal_numbers_of_picks_are_probable() -> None:
    assert found([7] * 10, 7.0) == []
    assert found([0] * 3, 0.0) == []


def test_client_with_all_picks_has_an_improbable_number() -> None:
    assert found([0, 0, 400, 0], 100.0) == [2]


def test_picks_of_a_client_that_was_never_available_are_improbable() -> None:
    assert improbable_picks(np.array([5, 5, 4]), np.array([7.0, 7.0, 0.0])).tolist() == [2]


def test_uniform_selection_gives_no_client_an_improbable_number() -> None:
    for seed in range(50):
        picks = np.zeros(60, dtype=np.int64)
        for selection in rounds(Uniform(), population(60), 9, 40, seed=seed):
            picks[selection.rows] += 1
        assert found(picks, 6.0) == []


def test_client_selected_in_every_round_has_an_improbable_number() -> None:
    """In 40 rounds of 9 of 60 clients, six picks of one client are expected; forty are
    improbable."""
    picks = [5] * 60
    picks[17] = 40
    assert found(picks, 6.0) == [17]
