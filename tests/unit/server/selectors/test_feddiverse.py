from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from support.populations import context, population, rounds, select, table_6

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Population, Selector, Signal
from potluck.server.selectors.feddiverse import FedDiverse

FIVE: list[list[float]] = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.1, 0.1, 0.2], [0.2, 0.3, 0.1]]


def picks(selector: FedDiverse, federation: Population, count: int, t: int) -> NDArray[np.int64]:
    """Return the number of times that each row is selected in t rounds."""
    chosen = [selection.rows for selection in rounds(selector, federation, count, t)]
    return np.bincount(np.concatenate(chosen), minlength=len(federation))


def threes_starting_from_sc(selector: FedDiverse) -> list[list[int]]:
    """Return selections of three of FIVE in rounds that start from SC, with client 2 drawn
    first."""
    federation = population(5, triplet_rows=FIVE)
    found = (
        select(selector, selector.init(federation), context(federation, 3, seed=seed)).rows.tolist()
        for seed in range(100)
    )
    return [rows for rows in found if rows[0] == 2]


def test_feddiverse_selects_as_in_the_worked_example() -> None:
    threes = threes_starting_from_sc(FedDiverse())
    assert {tuple(rows) for rows in threes} == {(2, 0, 1), (2, 1, 0)}


def test_feddiverse_with_a_signed_product_selects_as_the_printed_example() -> None:
    """With a sign, client 3, which has the least CI left, comes third, not the pure CI client 0."""
    threes = threes_starting_from_sc(FedDiverse(cross_product="signed"))
    assert {tuple(rows) for rows in threes if rows[1] == 1} == {(2, 1, 3)}


def test_first_client_is_drawn_in_proportion_to_its_spurious_correlation() -> None:
    """Clients 2, 3 and 4 have spurious correlations 1, .2 and .1: client 2 is first in 10 of 13."""
    federation = population(5, triplet_rows=FIVE)
    firsts = [
        select(FedDiverse(), FedDiverse().init(federation), context(federation, 1, seed=seed)).rows
        for seed in range(2000)
    ]
    shares = np.bincount(np.concatenate(firsts), minlength=5) / 2000
    np.testing.assert_allclose(shares, np.array([0, 0, 10, 2, 1]) / 13, atol=0.04)


def test_true_triplets_select_the_three_client_types_equally_often() -> None:
    shares = picks(FedDiverse(), table_6("spawrious-gsc"), 9, 2000) / (2000 * 9)
    by_type = [shares[:4].sum(), shares[4:8].sum(), shares[8:].sum()]
    np.testing.assert_allclose(by_type, 1 / 3, atol=0.02)


def test_signed_product_selects_clients_with_spurious_correlation_more_often() -> None:
    selector = FedDiverse(cross_product="signed")
    shares = picks(selector, table_6("spawrious-gsc"), 9, 2000) / (2000 * 9)
    by_type = [shares[:4].sum(), shares[4:8].sum(), shares[8:].sum()]
    np.testing.assert_allclose(by_type, [0.302, 0.262, 0.435], atol=0.015)


@pytest.mark.parametrize(("cross_product", "share"), [("absolute", 1.0), ("signed", 0.11)])
def test_class_imbalanced_clients_of_waterbirds_are_selected_in_most_rounds(
    cross_product: Literal["absolute", "signed"], share: float
) -> None:
    """Clients 0, 1, 2 have more class than attribute imbalance; `share`: rounds with all three."""
    selector = FedDiverse(cross_product=cross_product)
    chosen = [set(s.rows.tolist()) for s in rounds(selector, table_6("waterbirds-dist"), 9, 2000)]
    assert np.mean([{0, 1, 2} <= rows for rows in chosen]) == pytest.approx(share, abs=0.03)


def test_rotation_by_round_weights_first_by_sc_then_ci_then_ai() -> None:
    reasons = [s.reasons for s in rounds(FedDiverse(), table_6("spawrious-gsc"), 9, 4)]
    starts = [{reason for reason in each if reason.endswith("weighted")} for each in reasons]
    assert starts == [{"sc-weighted"}, {"ci-weighted"}, {"ai-weighted"}, {"sc-weighted"}]


def test_rotation_by_triplet_changes_the_component_within_a_round() -> None:
    selector = FedDiverse(rotation="triplet")
    reasons = [s.reasons[::3] for s in rounds(selector, table_6("spawrious-gsc"), 9, 2)]
    assert reasons == [
        ("sc-weighted", "ci-weighted", "ai-weighted"),
        ("ci-weighted", "ai-weighted", "sc-weighted"),
    ]


def test_feddiverse_reasons_name_the_previously_selected_clients() -> None:
    first, second, third = next(rounds(FedDiverse(), table_6("spawrious-gsc"), 3, 1)).rows
    reasons = next(rounds(FedDiverse(), table_6("spawrious-gsc"), 3, 1)).reasons
    assert reasons == (
        "sc-weighted",
        f"complement of k{first}",
        f"has what k{first} and k{second} lack",
    )
    assert third not in (first, second)


@pytest.mark.parametrize("count", [4, 5])
def test_feddiverse_cohort_size_need_not_be_a_multiple_of_three(count: int) -> None:
    assert len(next(rounds(FedDiverse(), table_6("spawrious-gsc"), count, 1)).rows) == count


def test_known_triplets_are_computed_from_interaction_matrices() -> None:
    selector = FedDiverse(triplets="known")
    assert selector.needs_profiles == {Signal.INTERACTION_MATRIX}
    estimated = [s.rows.tolist() for s in rounds(FedDiverse(), table_6("spawrious-gai"), 9, 20)]
    known = [s.rows.tolist() for s in rounds(selector, table_6("spawrious-gai"), 9, 20)]
    assert known == estimated


def test_clients_with_zero_triplets_are_drawn_uniformly() -> None:
    counts = picks(FedDiverse(), population(12, triplet_rows=np.zeros((12, 3))), 4, 3000)
    np.testing.assert_allclose(counts / 3000, 1 / 3, atol=0.05)


def test_feddiverse_selects_clients_without_a_triplet_last() -> None:
    rows = np.array([[np.nan] * 3, [1, 0, 0], [np.nan] * 3, [0, 0, 1]])
    for selection in rounds(FedDiverse(), population(4, triplet_rows=rows), 3, 30):
        assert set(selection.rows[:2].tolist()) == {1, 3}
        assert selection.reasons[2] == "no triplet; drawn uniformly"


def test_error_about_an_invalid_option_value_lists_the_valid_ones() -> None:
    with pytest.raises(
        ConfigurationError, match="'rotation' is 'daily'; it must be 'round' or 'triplet'"
    ):
        create(Selector, "feddiverse", {"rotation": "daily"})
