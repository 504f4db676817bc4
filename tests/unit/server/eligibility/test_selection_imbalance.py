import numpy as np
import pytest
from support.populations import population, rounds

from potluck.server.eligibility.picks import selection_imbalance
from potluck.server.selectors.uniform import Uniform


def test_equal_selection_counts_have_no_imbalance() -> None:
    found = selection_imbalance(np.full(10, 7))
    assert found is not None
    assert (found.gini, found.times_fair, found.unlikely.tolist()) == (0, 1, [])


def test_selection_imbalance_of_one_client_with_all_selections_is_computed() -> None:
    found = selection_imbalance(np.array([0, 0, 400, 0]))
    assert found is not None
    assert found.gini == pytest.approx(0.75)
    assert found.busiest == 2
    assert found.times_fair == 4
    assert found.unlikely.tolist() == [2]


def test_selection_imbalance_is_none_before_the_first_selection() -> None:
    assert selection_imbalance(np.zeros(3, dtype=np.int64)) is None


def test_uniform_selection_gives_no_client_an_improbable_count() -> None:
    for seed in range(50):
        picks = np.zeros(60, dtype=np.int64)
        for selection in rounds(Uniform(), population(60), 9, 40, seed=seed):
            picks[selection.rows] += 1
        found = selection_imbalance(picks)
        assert found is not None
        assert not len(found.unlikely)


def test_client_selected_in_every_round_has_an_improbable_count() -> None:
    """In 40 rounds of 9 of 60 clients, six picks of one client are expected; forty are
    improbable."""
    picks = np.full(60, 5)
    picks[17] = 40
    found = selection_imbalance(picks)
    assert found is not None
    assert found.unlikely.tolist() == [17]
