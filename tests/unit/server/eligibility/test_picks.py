"""No client is selected more often than the run's limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.server.eligibility.picks import PickRecord, cap_on_picks, under_cap
from potluck.server.machine.roster import RunRoster


def rows(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("share", "round_number", "cap"),
    [(1.0, 1, 1), (1.0, 7, 7), (0.5, 1, 1), (0.5, 2, 1), (0.5, 3, 2), (0.1, 30, 3), (0.1, 31, 4)],
)
def test_cap_on_selections_grows_with_the_round_number(
    share: float, round_number: int, cap: int
) -> None:
    assert cap_on_picks(share, round_number) == cap


def test_clients_at_the_selection_cap_are_not_eligible() -> None:
    kept = under_cap(rows(0, 1, 2, 3), rows(2, 1, 0, 2), cap=2, count=2)
    np.testing.assert_array_equal(kept, [1, 2])


def test_clients_below_the_cap_and_new_clients_stay_eligible() -> None:
    roster = RunRoster("abcd")
    picks = PickRecord(roster)
    picks.restore({"b": 2, "c": 3, "d": 5})
    roster.append("efg")
    kept = under_cap(rows(0, 1, 2, 3, 6), picks.counts, cap=3, count=3)
    np.testing.assert_array_equal(kept, [0, 1, 6])


def test_least_selected_clients_above_the_cap_fill_up_too_few_eligible_ones() -> None:
    kept = under_cap(rows(0, 1, 2, 3), rows(3, 2, 0, 2), cap=2, count=3)
    np.testing.assert_array_equal(kept, [1, 2, 3])


def test_least_selected_clients_on_other_hosts_fill_up_too_few_hosts() -> None:
    def kept(least_hosts: int) -> list[int]:
        found: list[int] = under_cap(
            rows(0, 1, 2, 3, 4),
            rows(0, 0, 5, 3, 4),
            cap=2,
            count=2,
            hosts=["a", "a", "b", "c", "c"],
            least_hosts=least_hosts,
        ).tolist()
        return found

    assert kept(1) == [0, 1]
    assert kept(2) == [0, 1, 3]
    assert kept(3) == [0, 1, 2, 3]


@given(
    picks=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    cap=st.integers(1, 9),
    count=st.integers(1, 20),
    data=st.data(),
)
def test_cap_always_leaves_enough_eligible_clients(
    picks: list[int], cap: int, count: int, data: st.DataObject
) -> None:
    everybody = st.sampled_from(range(len(picks)))
    available = rows(*sorted(data.draw(st.sets(everybody, min_size=1))))
    kept = under_cap(available, rows(*picks), cap=cap, count=count)
    assert set(kept) <= set(available)
    assert len(kept) == len(set(kept)) >= min(count, len(available))
    np.testing.assert_array_equal(kept, np.sort(kept))
