"""Sorting networks put every rank where it belongs."""

from __future__ import annotations

from itertools import product

import pytest

from potluck.server.reduce.reduction import selection_network


def applied(values: tuple[int, ...], begin: int, end: int) -> list[int]:
    row: list[int | None] = list(values)
    for low, high, keeps_low, keeps_high in selection_network(len(values), begin, end):
        first, second = row[low], row[high]
        assert first is not None, "a value is compared that was given up"
        assert second is not None, "a value is compared that was given up"
        row[low] = min(first, second) if keeps_low else None
        row[high] = max(first, second) if keeps_high else None
    kept = row[begin:end]
    assert None not in kept
    return [value for value in kept if value is not None]


@pytest.mark.parametrize("values", range(1, 10))
def test_sorting_network_puts_every_rank_in_place_for_all_inputs(values: int) -> None:
    # The 0-1 principle: a network that sorts all sequences of zeros and ones sorts any numbers.
    for trimmed in range((values + 1) // 2):
        for row in product((0, 1), repeat=values):
            end = values - trimmed
            assert applied(row, trimmed, end) == sorted(row)[trimmed:end]


def test_median_network_has_fewer_comparisons_than_a_full_sort() -> None:
    assert len(selection_network(10, 0, 10)) == 31
    assert len(selection_network(10, 4, 6)) < 31
    assert selection_network(1, 0, 1) == ()
