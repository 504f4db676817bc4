import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.populations import context, labelled, outcome, population, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Floats, Selector
from potluck.server.selectors.fedgs import FedGS, edges, farthest, overdue, shortest_paths
from potluck.server.state import State

CHAIN = [[4.0, 0.0, 0.0], [2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 3.0, 1.0], [0.0, 0.0, 7.0]]
"""Label counts of five clients, each with labels like those of the next client."""


def plain_paths(labels: list[list[float]], threshold: float, width: float) -> list[list[float]]:
    """Return path lengths as the authors do: normalised similarities, edges, Floyd, normalised."""
    clients = range(len(labels))

    def inner(a: list[float], b: list[float]) -> float:
        return math.fsum(x * y for x, y in zip(a, b, strict=True))

    def cosine(a: list[float], b: list[float]) -> float:
        return inner(a, b) / math.sqrt(inner(a, a) * inner(b, b))

    alike = [[0.0 if i == j else cosine(labels[i], labels[j]) for j in clients] for i in clients]
    lowest, highest = min(map(min, alike)), max(map(max, alike))
    lengths = [[math.inf] * len(labels) for _ in clients]
    for i, j in itertools.product(clients, repeat=2):
        likeness = (alike[i][j] - lowest) / (highest - lowest)
        if i == j:
            lengths[i][j] = 0.0
        elif likeness > threshold:
            lengths[i][j] = math.exp(-(likeness**2) / width)
    for k, i, j in itertools.product(clients, repeat=3):
        lengths[i][j] = min(lengths[i][j], lengths[i][k] + lengths[k][j])
    largest = max(x for row in lengths for x in row if x < math.inf)
    return [[min(x / largest, 1.0) for x in row] for row in lengths]


@pytest.mark.parametrize(("threshold", "width"), [(0.1, 0.01), (0.01, 0.1), (0.5, 1.0)])
def test_paths_are_those_of_the_authors_arithmetic(threshold: float, width: float) -> None:
    generator = np.random.default_rng(0)
    for labels in (np.array(CHAIN), generator.dirichlet([0.3] * 5, 9)):
        found = shortest_paths(edges(labels, threshold, width))
        expected = plain_paths(labels.tolist(), threshold, width)
        assert found == pytest.approx(np.array(expected), rel=1e-6, abs=1e-9)


def test_only_similar_clients_have_an_edge() -> None:
    """By hand: the largest cosine, of clients 0 and 1, is .894; that of 1 and 3, .424, is more than
    .45 times as large, that of 3 and 4, .316, is less."""
    lengths = edges(np.array(CHAIN), 0.45, 0.01)
    neighbours = np.isfinite(lengths) & (lengths > 0)
    assert neighbours.sum(axis=1).tolist() == [2, 3, 3, 2, 0]
    assert lengths[0, 1] == pytest.approx(math.exp(-100))
    paths = shortest_paths(lengths)
    assert paths[0, 4] == paths[4, 3] == 1.0  # client 4 has no edge
    assert paths.diagonal().tolist() == [0.0] * 5


def score(distances: Floats, often: Floats, cohort: tuple[int, ...]) -> float:
    pairs = list(itertools.combinations(cohort, 2))
    mean = sum(distances[i, j] for i, j in pairs) / len(pairs) if pairs else 0.0
    return float(mean - sum(often[i] for i in cohort))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([0.0, 0.1, 1.0, 5.0]))
def test_no_exchange_of_two_clients_improves_a_cohort(seed: int, size: int, alpha: float) -> None:
    generator = np.random.default_rng(seed)
    distances = generator.random((9, 9))
    distances = alpha * (distances + distances.T) / 2
    np.fill_diagonal(distances, 0)
    often = overdue(generator.integers(0, 4, 9), size, 9)
    found = tuple(farthest(distances, often, size).tolist())
    assert len(set(found)) == size
    reached = score(distances, often, found)
    for out, into in itertools.product(found, set(range(9)) - set(found)):
        other = tuple(sorted({*found, into} - {out}))
        assert score(distances, often, other) <= reached + 1e-9


def test_most_cohorts_are_the_best_of_all() -> None:
    """The authors solve this exactly, with a time limit; a local search may miss it."""
    generator = np.random.default_rng(5)
    best = 0
    for _ in range(40):
        distances = generator.random((9, 9))
        distances = (distances + distances.T) / 2
        np.fill_diagonal(distances, 0)
        often = overdue(generator.integers(0, 3, 9), 4, 9)
        reached = score(distances, often, tuple(farthest(distances, often, 4).tolist()))
        most = max(score(distances, often, each) for each in itertools.combinations(range(9), 4))
        assert reached > most - 0.1
        best += reached > most - 1e-9
    assert best >= 30


def test_the_penalty_of_earlier_selections_by_hand() -> None:
    """v = (3, 0, 0), mean 1; M/N = 2/3: 2(3 − 1 − 2/3) + 1 = 11/3, over K − 1 = 2."""
    assert overdue(np.array([3, 0, 0]), 2, 3) == pytest.approx([11 / 6, -7 / 6, -7 / 6])


def test_without_alpha_the_clients_selected_least_are_chosen() -> None:
    federation = labelled(CHAIN)
    state = State(arrays={"selections": np.array([4, 1, 3, 0, 2])})
    found = select(FedGS(alpha=0), state, context(federation, 3))
    assert found.rows.tolist() == [3, 1, 4]
    assert found.reasons[0].startswith("selected 0 times before, mean distance ")


def test_a_large_alpha_chooses_clients_far_apart() -> None:
    """Two kinds of clients; a cohort of two has one of each, whatever was selected before."""
    federation = labelled([[9.0, 1.0]] * 3 + [[1.0, 9.0]] * 3)
    state = State(arrays={"selections": np.array([0, 0, 0, 7, 7, 7])})
    for seed in range(5):
        rows = select(FedGS(alpha=50), state, context(federation, 2, seed=seed)).rows
        assert sorted(rows // 3) == [0, 1]


def test_clients_that_were_away_catch_up() -> None:
    """Client 0 is available from round 11; then it is selected until it has caught up."""
    federation = labelled([[5.0, 5.0]] * 6)
    selector = FedGS()
    state, times = selector.init(federation), np.zeros(6, dtype=np.int64)
    for number in range(1, 31):
        available = np.arange(1 if number < 11 else 0, 6)
        selection = select(
            selector, state, context(federation, 2, number=number, available=available)
        )
        times[selection.rows] += 1
        state = selector.observe(state, outcome(number, selection))
    assert times.tolist() == [10] * 6


def test_clients_without_samples_or_profile_come_last() -> None:
    federation = labelled([[0.0, 0.0], [3.0, 4.0], [np.nan, np.nan], [-5.0, -2.0], [9.0, 1.0]])
    selector = FedGS()
    found = select(selector, selector.init(federation), context(federation, 4))
    assert set(found.rows[:2].tolist()) == {1, 4}
    assert found.reasons[2] == found.reasons[3] == "no label counts; drawn uniformly"


def test_a_large_roster_is_refused() -> None:
    federation = population(1001, classes=2, label_counts=np.ones((1001, 2)))
    selector = FedGS()
    with pytest.raises(
        ConfigurationError, match=r"fedgs .* up to 1,000 clients, but the run has 1,001"
    ):
        select(selector, selector.init(federation), context(federation, 2))


@pytest.mark.parametrize("options", [{"alpha": -1}, {"threshold": 1}, {"width": 0}])
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Selector, "fedgs", options)
