import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from support.plain_loops import position_at
from support.populations import context, population, rounds, select, table_6

from potluck.common.errors import ConfigurationError
from potluck.common.learning.heterogeneity import triplets
from potluck.common.settings.plugins import create
from potluck.server.selection import Population, RoundOutcome, Selector, Signal
from potluck.server.selectors.feddiverse import FedDiverse
from potluck.server.state import State

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


def plain_dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def plain_best(scores: Mapping[int, float], twin: np.random.Generator) -> int:
    """Return the client with the largest score; draw among those within 10⁻¹² of it."""
    tied = [row for row, score in scores.items() if score >= max(scores.values()) - 1e-12]
    return tied[int(twin.integers(len(tied)))] if len(tied) > 1 else tied[0]


def plain_cohort(
    triplets: Mapping[int, Sequence[float]],
    size: int,
    turns: Sequence[int],
    twin: np.random.Generator,
    *,
    signed: bool,
) -> list[int]:
    """Return a cohort by Alg. 5 and 6. turns: t of each three clients."""
    directions = {
        row: [value / sum(triplet) for value in triplet] if sum(triplet) else [1 / 3] * 3
        for row, triplet in triplets.items()
    }
    left, cohort = list(triplets), list[int]()
    while left and len(cohort) < size:
        three, place = divmod(len(cohort), 3)
        last = [directions[row] for row in cohort[3 * three :]]
        if place == 0:
            component = {1: 2, 2: 0, 0: 1}[turns[three] % 3]
            weights = [triplets[row][component] for row in left]
            weights = weights if sum(weights) else [1.0] * len(left)
            row = left[position_at(weights, twin.random())]
        elif place == 1:
            row = plain_best({row: -plain_dot(last[0], directions[row]) for row in left}, twin)
        else:
            (a, b, c), (d, e, f) = last
            normal = b * f - c * e, c * d - a * f, a * e - b * d
            lengths = {row: plain_dot(normal, directions[row]) for row in left}
            scores = lengths if signed else {row: abs(lengths[row]) for row in left}
            row = plain_best(scores, twin)
        left.remove(row)
        cohort.append(row)
    return cohort


def plain_entropy(counts: Iterable[float]) -> float:
    numbers = [number for number in counts if number > 0]
    return -sum(number / sum(numbers) * math.log(number / sum(numbers)) for number in numbers)


def plain_triplet(matrix: Sequence[Sequence[float]]) -> list[float]:
    of_class = plain_entropy(sum(row) for row in matrix)
    of_attribute = plain_entropy(sum(column) for column in zip(*matrix, strict=True))
    mutual = of_class + of_attribute - plain_entropy(number for row in matrix for number in row)
    both = of_class + of_attribute
    found = [
        1 - of_class / math.log(len(matrix)),
        1 - of_attribute / math.log(2),
        2 * mutual / both if both > 0 else 0.0,
    ]
    return [min(1.0, max(0.0, value)) for value in found]


def test_client_without_samples_is_chosen_last_if_triplets_are_known() -> None:
    matrices = np.array([np.zeros((2, 2)), *[[[9.0, 1.0], [1.0, 9.0]]] * 3])
    federation = population(4, matrices=matrices)
    for seed in range(20):
        chosen = select(FedDiverse(triplets="known"), State(), context(federation, 3, seed=seed))
        assert sorted(chosen.rows.tolist()) == [1, 2, 3]


def test_even_matrices_have_triplets_of_exactly_zero() -> None:
    matrices = np.array([np.full((3, 2), count) for count in (1.0, 5.0, 7.0, 1e5)])
    assert triplets(matrices).tolist() == [[0.0, 0.0, 0.0]] * 4
    nearly = np.full((3, 2), 1e5)
    nearly[0, 0] += 1
    assert (triplets(nearly[None]) > 0).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cross_product", ["absolute", "signed"])
@pytest.mark.parametrize("rotation", ["round", "triplet"])
@pytest.mark.parametrize("triplets", ["estimated", "known"])
def test_rounds_agree_with_a_second_implementation(
    triplets: Literal["estimated", "known"],
    rotation: Literal["round", "triplet"],
    cross_product: Literal["absolute", "signed"],
    seed: int,
) -> None:
    """Many clients have equal triplets, some have zeros, and clients 3 and 8 have none. Clients 11
    to 14 join in round 4."""
    generator, clients = np.random.default_rng(seed), 15
    selector = FedDiverse(rotation=rotation, cross_product=cross_product, triplets=triplets)
    rows = generator.choice([0, 0, 0.25, 0.5, 1], (clients, 3))
    rows[[1, 12]] = 0
    matrices = generator.integers(1, 30, (clients, 3, 2)) * 1.0
    matrices[2], matrices[5], matrices[6, 0] = [[7, 7], [0, 0], [0, 0]], matrices[4], 0
    rows[[3, 8]], matrices[[3, 8]] = np.nan, np.nan
    known = [plain_triplet(matrix) for matrix in matrices.tolist()]
    told, state = rows.tolist() if triplets == "estimated" else known, selector.init(population(11))
    for number in range(1, 10):
        clients, count = (15 if number >= 4 else 11), int(generator.integers(2, 12))
        federation = population(clients, triplet_rows=rows[:clients], matrices=matrices[:clients])
        here = np.flatnonzero(generator.random(clients) < 0.8)
        given = context(federation, count, number=number, seed=seed, available=here)
        selection = select(selector, state, given)
        size, twin = min(count, len(here)), given.generator("feddiverse")
        turns = [number + (three if rotation == "triplet" else 0) for three in range(4)]
        candidates = {row: told[row] for row in here.tolist() if row not in (3, 8)}
        signed = cross_product == "signed"
        cohort = plain_cohort(candidates, size, turns, twin, signed=signed)
        rest = [row for row in here.tolist() if row not in candidates]
        drawn = twin.choice(rest, size - len(cohort), replace=False).tolist()
        assert selection.rows.tolist() == cohort + drawn

        arrived = selection.rows[generator.random(size) < 0.5]
        seconds = np.where(np.isin(selection.rows, arrived), 1.0, np.nan)
        ended = RoundOutcome(
            round=number, selected=selection.rows, included=arrived, seconds=seconds
        )
        state = selector.observe(state, ended)
