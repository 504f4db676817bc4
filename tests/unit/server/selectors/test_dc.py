import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from support.populations import (
    context,
    difficult_labels,
    labelled,
    population,
    rounds,
    select,
)

from potluck.common.errors import ConfigurationError
from potluck.server.selection import Population, Selection, Selector
from potluck.server.selectors.dc import DcBalanced, DcRandom, DcReal
from potluck.server.selectors.dc_exhaustive import DcExhaustive, nearest_subset
from potluck.server.selectors.parts.dc_parts import distance

Floats = NDArray[np.float64]

FIVE = [[1, 3, 0], [5, 1, 4], [1, 0, 1], [2, 1, 1], [1, 0, 1]]
ONES = np.ones(3)


def starting_with(row: int, selector: Selector, federation: Population, count: int) -> Selection:
    """Return the selection of the first seed that draws `row` first."""
    for seed in range(200):
        selection = next(rounds(selector, federation, count, 1, seed=seed))
        if selection.rows[0] == row:
            return selection
    raise AssertionError("no seed draws it")


def after(rows: NDArray[np.int64], target: Floats = ONES) -> float:
    return distance(np.array(FIVE, dtype=np.float64)[rows].sum(axis=0), target)


def test_dc_balanced_selects_as_in_the_worked_example() -> None:
    selection = starting_with(0, DcBalanced(added=2), labelled(FIVE), 3)
    assert set(selection.rows.tolist()) == {0, 1, 2} or set(selection.rows.tolist()) == {0, 1, 4}
    assert after(selection.rows) == pytest.approx(0.02627, abs=5e-6)
    assert selection.reasons[0] == "drawn uniformly"
    assert selection.reasons[2].endswith("→ 0.0263")


def test_dc_exhaustive_selects_as_in_the_worked_example() -> None:
    selection = starting_with(0, DcExhaustive(added=2), labelled(FIVE), 3)
    assert sorted(selection.rows.tolist()) == [0, 2, 4]
    assert after(selection.rows) == pytest.approx(0.01527, abs=5e-6)
    assert selection.reasons[1] == "best of 6 subsets, distance to target 0.0153"


def test_dc_exhaustive_searches_all_subsets_at_the_size_of_the_paper() -> None:
    """M = 100, m = 10, m_DC = 5: C(90, 5) subsets; the best is at least as good as greedy's."""
    table = np.floor(np.random.default_rng(4).dirichlet([0.2] * 10, 100) * 300)
    federation = population(100, classes=10, label_counts=table)
    best = next(rounds(DcExhaustive(added=5), federation, 15, 1))
    greedy = next(rounds(DcBalanced(added=5), federation, 15, 1))
    assert best.rows[:10].tolist() == greedy.rows[:10].tolist()
    assert best.reasons[10].startswith("best of 43949268 subsets")
    apart = [distance(table[each.rows].sum(axis=0), np.ones(10)) for each in (best, greedy)]
    assert apart[0] <= apart[1] + 1e-12


def test_dc_real_minimises_the_distance_to_the_labels_of_the_federation() -> None:
    federation = labelled([[9, 0], [0, 1], [9, 0], [0, 1], [9, 1]])
    selection = starting_with(1, DcReal(added=1), federation, 2)
    table = np.array(federation.label_counts)
    distances = [distance(table[1] + table[row], table.sum(axis=0)) for row in (0, 2, 3, 4)]
    best = distance(table[selection.rows].sum(axis=0), table.sum(axis=0))
    assert best == pytest.approx(min(distances))


def test_dc_real_uses_a_secure_label_sum_instead_of_the_sum_of_profiles() -> None:
    known = labelled([[1, 0], [9, 0], [0, 9]])
    assert starting_with(0, DcReal(added=1), known, 2).rows[1] in (1, 2)
    totals = Population(
        ids=known.ids,
        classes=2,
        samples=known.samples,
        label_counts=known.label_counts,
        label_totals=np.array([0.0, 100.0]),
    )
    assert starting_with(0, DcReal(added=1), totals, 2).rows[1] == 2


def test_all_dc_selectors_draw_the_same_first_clients() -> None:
    generator = np.random.default_rng(0)
    federation = labelled(generator.integers(0, 20, (20, 4)).tolist())
    selectors = (DcReal(), DcBalanced(), DcRandom(), DcExhaustive())
    starts = {tuple(next(rounds(s, federation, 9, 1)).rows[:4].tolist()) for s in selectors}
    assert len(starts) == 1


@pytest.mark.parametrize("selector", [DcBalanced(), DcReal(), DcRandom(), DcExhaustive()])
def test_dc_draws_one_client_uniformly_for_a_small_cohort(selector: Selector) -> None:
    selection = next(rounds(selector, labelled(FIVE), 3, 1))
    assert len(selection.rows) == 3
    assert selection.reasons.count("drawn uniformly") == 1


def test_early_stop_selects_a_smaller_cohort_without_improvement() -> None:
    """Equal clients are already as near as possible: no client is added."""
    federation = labelled([[3, 3]] * 20)
    assert len(next(rounds(DcBalanced(stop_early=True), federation, 15, 1)).rows) == 10
    assert len(next(rounds(DcBalanced(), federation, 15, 1)).rows) == 15


def test_early_stop_adds_clients_while_the_distance_falls() -> None:
    federation = labelled([[9, 0], [9, 0], [0, 3], [0, 3]])
    first = starting_with(0, DcBalanced(added=2, stop_early=True), federation, 3)
    assert sorted(first.rows.tolist()) == [0, 2, 3]


def test_dc_balanced_does_not_add_clients_without_samples() -> None:
    assert distance(np.zeros(3), ONES) == 1
    federation = labelled([[0, 0], [4, 0], [0, 4]])
    selection = starting_with(1, DcBalanced(added=1), federation, 2)
    assert selection.rows.tolist() == [1, 2]


@pytest.mark.parametrize("selector", [DcBalanced(added=2), DcReal(added=2), DcExhaustive(added=2)])
def test_dc_does_not_add_clients_without_label_counts(selector: Selector) -> None:
    counts = np.array([*FIVE, [np.nan] * 3])
    for seed in range(30):
        selection = next(
            rounds(selector, population(6, classes=3, label_counts=counts), 4, 1, seed=seed)
        )
        assert 5 not in selection.rows[2:]


def test_dc_exhaustive_refuses_too_many_subsets_naming_their_number() -> None:
    federation = labelled(np.random.default_rng(0).integers(0, 9, (100, 10)).tolist())
    with pytest.raises(ConfigurationError, match="77515521435 ways, more than 10\\^8"):
        next(rounds(DcExhaustive(added=8), federation, 18, 1, seed=1))


@settings(max_examples=40, deadline=None)
@given(
    hnp.arrays(np.float64, (9, 3), elements=st.integers(0, 9).map(float)),
    hnp.arrays(np.float64, 3, elements=st.integers(0, 9).map(float)),
    st.integers(1, 9),
)
def test_nearest_subset_has_the_minimum_distance_of_all_subsets(
    counts: Floats, base: Floats, size: int
) -> None:
    best = nearest_subset(counts, base, ONES, size, np.random.default_rng(0))
    assert len(set(best.tolist())) == size
    found = distance(base + counts[best].sum(axis=0), ONES)
    subsets = combinations(range(9), size)
    least = min(distance(base + counts[list(rows)].sum(axis=0), ONES) for rows in subsets)
    assert found == pytest.approx(least, abs=1e-12)


def test_nearest_subset_is_drawn_uniformly_among_ties() -> None:
    """Any two of four equal clients: six subsets, each with probability ⅙."""
    counts = np.tile([2.0, 1.0, 1.0], (4, 1))
    generator = np.random.default_rng(0)
    found = [tuple(nearest_subset(counts, ONES, ONES, 2, generator)) for _ in range(1200)]
    shares = np.unique(found, axis=0, return_counts=True)[1] / 1200
    np.testing.assert_allclose(shares, 1 / 6, atol=0.04)


def test_dc_balanced_adds_the_nearest_of_70000_clients() -> None:
    """Enough clients for several threads; each pick is a least distance, computed again here."""
    generator = np.random.default_rng(3)
    counts = np.floor(generator.dirichlet([0.3] * 10, 70_000) * 300)
    federation = population(70_000, classes=10, label_counts=counts)
    rows = next(rounds(DcBalanced(added=4), federation, 6, 1)).rows
    for chosen in range(2, 6):
        sums = counts[rows[:chosen]].sum(axis=0) + counts
        distances = 1 - sums.sum(axis=1) / (np.linalg.norm(sums, axis=1) * np.sqrt(10))
        distances[rows[:chosen]] = np.inf
        assert distances[rows[chosen]] <= distances.min() + 1e-12


def plain_sum(vectors: Sequence[Sequence[float]]) -> list[float]:
    """Return the sum of vectors of four numbers. Negative numbers and NaN are replaced by 0."""
    return [sum(vector[label] for vector in vectors if vector[label] > 0) for label in range(4)]


def plain_distance(counts: Sequence[float], target: Sequence[float]) -> float:
    """Return 1 − cosine; 1 if a vector is zero."""
    squares = [sum(number * number for number in vector) for vector in (counts, target)]
    lengths = math.sqrt(squares[0]) * math.sqrt(squares[1])
    inner = sum(math.prod(pair) for pair in zip(counts, target, strict=True))
    return 1 - inner / lengths if lengths > 0 else 1.0


def plain_cohort(
    labels: Mapping[int, Sequence[float]],
    sizes: tuple[int, int],
    target: Sequence[float],
    stop_early: bool,
    twin: np.random.Generator,
) -> list[tuple[int, str, float, float]]:
    """Return, for each client, its row, the kind of the choice, and the cohort's distance from the
    target before and after.

    labels: counts of the available clients. sizes: number of clients, and how many of them are
    added by distance."""
    size, added = sizes
    start = twin.choice(list(labels), max(size - added, 1), replace=False).tolist()
    cohort: list[tuple[int, str, float, float]] = [(row, "drawn", 0.0, 0.0) for row in start]
    while len(cohort) < size:
        chosen = [labels[row] for row, _, _, _ in cohort]
        left = [row for row in labels if row not in [each[0] for each in cohort]]
        eligible = [row for row in left if sum(plain_sum([labels[row]])) > 0]
        if not eligible:
            filling = twin.choice(left, size - len(cohort), replace=False).tolist()
            return [*cohort, *((row, "filled", 0.0, 0.0) for row in filling)]
        before = plain_distance(plain_sum(chosen), target)
        distances = {
            row: plain_distance(plain_sum([*chosen, labels[row]]), target) for row in eligible
        }
        best = [row for row in eligible if distances[row] <= min(distances.values()) + 1e-12]
        row = best[int(twin.integers(len(best)))] if len(best) > 1 else best[0]
        if stop_early and distances[row] >= before - 1e-12:
            return cohort
        kind = "tied" if len(best) > 1 else "best"
        cohort.append((row, kind, before, distances[row]))
    return cohort


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("added", [3, 9])
@pytest.mark.parametrize("stop_early", [False, True])
@pytest.mark.parametrize("kind", [DcBalanced, DcReal])
def test_rounds_agree_with_a_second_implementation(
    kind: type[DcBalanced | DcReal], stop_early: bool, added: int, seed: int
) -> None:
    """Few clients are available in every fourth round, and clients 12 to 14 join in round 8. In
    every third round a secure sum is available; the one of round 9 has no positive count."""
    generator = np.random.default_rng(seed)
    selector = kind(added=added, stop_early=stop_early)
    table = difficult_labels(generator)
    kinds = Counter[str]()
    for number in range(1, 31):
        clients = 15 if number >= 8 else 12
        here = np.flatnonzero(generator.random(clients) < (0.3 if number % 4 == 0 else 0.8))
        federation = labelled(table[:clients].tolist())
        target = plain_sum(table[:clients].tolist())
        if number % 3 == 0:
            totals = generator.integers(-9, 0 if number == 9 else 30, 4).astype(np.float64)
            federation = replace(federation, label_totals=totals)
            target = plain_sum([totals.tolist()])
        if kind is DcBalanced:
            target = [1.0] * 4
        given_context = context(federation, 6, number=number, seed=seed, available=here)
        selection = select(selector, selector.init(federation), given_context)

        labels = {row: table[row].tolist() for row in here.tolist()}
        size, twin = min(6, len(here)), given_context.generator("dc")
        cohort = plain_cohort(labels, (size, added), target, stop_early, twin)
        assert selection.rows.tolist() == [row for row, _, _, _ in cohort]
        for (_, choice, *distances), reason in zip(cohort, selection.reasons, strict=True):
            kinds[choice] += 1
            if choice in ("best", "tied"):
                words = reason.removeprefix("distance to target ").split(" → ")
                assert [float(word) for word in words] == pytest.approx(distances, abs=0.0000501)
                kinds["no nearer"] += distances[1] >= distances[0]
            else:
                why = {"drawn": "drawn uniformly", "filled": "no label counts; drawn uniformly"}
                assert reason == why[choice]
        kinds["stopped"] += len(cohort) < size
    assert min(kinds["best"], kinds["tied"], kinds["filled"]) > 0
    assert (kinds["stopped"] > 0) == stop_early
    assert (kinds["no nearer"] > 0) == (not stop_early)
