from collections import Counter

import numpy as np
import pytest
from scipy.cluster.vq import kmeans2
from support.populations import Respond, context, outcome, played, population, rounds, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Answers, Ask, Floats, Selector
from potluck.server.selectors.asking.hcsfed import HcsFed, equal_seats, neyman_seats
from potluck.server.selectors.parts.k_means import k_means, nearest

NAMES = [f"sketch-{number}" for number in range(1, 23)]
SIZES = (20, 3, 1)


def answering(sketches: Floats) -> Respond:
    def respond(ask: Ask) -> Answers:
        assert (ask.kind, ask.trains, list(ask.names)) == ("sketch", True, NAMES)
        return Answers(
            rows=ask.rows,
            values={name: sketches[ask.rows, place] for place, name in enumerate(NAMES)},
        )

    return respond


def three_groups(sizes: tuple[int, ...] = SIZES) -> Floats:
    """Return sketches of clients in three groups, each close to one of three distant points."""
    generator = np.random.default_rng(1)
    centres = 10 * generator.standard_normal((len(sizes), 22))
    noise = 0.01 * generator.standard_normal((sum(sizes), 22))
    return np.repeat(centres, sizes, axis=0) + noise


def test_hcsfed_seats_equal_the_worked_example() -> None:
    """A worked example."""
    assert equal_seats(np.array(SIZES), 9, 1) == [5, 3, 1]
    sizes = np.array([16, 4, 4])
    assert neyman_seats(sizes, np.array([1.0, 2, 3]), 9) == [4, 2, 3]
    assert neyman_seats(sizes, np.zeros(3), 9) == [6, 2, 1]
    assert neyman_seats(np.array([0, 1, 2]), np.zeros(3), 2) == [0, 1, 1]


def test_extra_seat_rotates_over_equal_clusters_by_round() -> None:
    even = np.array([20, 20, 20])
    assert [equal_seats(even, 10, number) for number in (1, 2, 3, 4)] == [
        [4, 3, 3],
        [3, 4, 3],
        [3, 3, 4],
        [4, 3, 3],
    ]


def test_k_means_centres_are_as_good_as_those_of_scipy() -> None:
    generator = np.random.default_rng(2)
    for _ in range(5):
        points = generator.standard_normal((200, 4))

        def far(centres: Floats, points: Floats = points) -> float:
            return float(((points[:, None] - centres) ** 2).sum(axis=2).min(axis=1).sum())

        theirs = min(far(kmeans2(points, 3, minit="++", rng=seed)[0]) for seed in range(10))
        assert far(k_means(points, 3)) <= theirs * 1.01
    points = generator.standard_normal((200, 4))
    large: Floats = 1e300 * points
    assert np.array_equal(nearest(large, k_means(large, 3)), nearest(points, k_means(points, 3)))
    assert len(k_means(np.ones((9, 2)), 3)) == 1, "equal points are one cluster"


def test_hcsfed_cohort_has_the_computed_seats_of_every_cluster() -> None:
    sketches, given = three_groups(), population(24)
    group = np.repeat(np.arange(3), SIZES)
    for seed in range(10):
        selector = HcsFed()
        chosen = select(
            selector, selector.init(given), context(given, 9, seed=seed), answering(sketches)
        )
        assert Counter(group[chosen.rows].tolist()) == {0: 5, 1: 3, 2: 1}
        assert any("5 of 20 clients: drawn uniformly" in reason for reason in chosen.reasons)


def test_hcsfed_asks_only_new_clients_and_clients_without_a_sketch() -> None:
    sketches, given = three_groups((4, 4, 4)), population(12)
    sketches[3, 5] = np.nan
    selector = HcsFed()
    state = selector.init(given)
    first = context(given, 3, available=np.arange(10))
    selection, answers = played(selector, state, first, answering(sketches))
    state = selector.observe(state, outcome(1, selection, answers))
    assert state.arrays["cluster"].tolist().count(-1) == 3
    second, answers = played(selector, state, context(given, 12, number=2), answering(sketches))
    assert answers[0].rows.tolist() == [3, 10, 11]
    assert second.rows[-1] == 3
    assert "gave no sketch" in second.reasons[-1]
    state = selector.observe(state, outcome(2, second, answers))
    clusters = state.arrays["cluster"]
    assert clusters[10] == clusters[11] == clusters[8], "to the nearest centre"
    later = context(given, 3, number=3, available=np.array([0, 4, 8]))
    assert played(selector, state, later, answering(sketches))[1] == []


def test_neyman_seats_draw_clients_with_larger_updates_more_often() -> None:
    """One cluster has two clients, one of them three times as far from the origin."""
    sketches = np.zeros((2, 22))
    sketches[:, 0] = (1.0, 3.0)
    selector, given = HcsFed(clusters=1, seats="neyman"), population(2)
    state = selector.init(given)
    drawn = Counter(
        int(select(selector, state, context(given, 1, seed=seed), answering(sketches)).rows[0])
        for seed in range(2000)
    )
    assert drawn[1] == pytest.approx(1500, abs=4 * (2000 * 0.1875) ** 0.5)


def test_hcsfed_selects_every_client_at_least_once_in_60_rounds() -> None:
    picks = Counter(
        row for selection in rounds(HcsFed(), population(24), 6, 60) for row in selection.rows
    )
    assert len(picks) == 24


@pytest.mark.parametrize(
    "options", [{"clusters": 0}, {"seats": "even"}, {"sketch": "sum"}, {"numbers": 65}]
)
def test_hcsfed_option_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Selector, "hcsfed", options)


def test_clusters_are_made_again_if_few_clients_answered_at_first() -> None:
    sketches, selector = three_groups(), HcsFed(clusters=3)
    federation = population(len(sketches))
    state, first = selector.init(federation), context(federation, 6, available=np.arange(1))
    selection, answers = played(selector, state, first, answering(sketches))
    state = selector.observe(state, outcome(1, selection, answers=answers))
    asked: list[int] = []

    def noting(ask: Ask) -> Answers:
        asked.append(len(ask.rows))
        return answering(sketches)(ask)

    for number in (2, 3):
        given = context(federation, 6, number=number)
        selection, answers = played(selector, state, given, noting)
        state = selector.observe(state, outcome(number, selection, answers=answers))
    assert len(state.arrays["centres"]) == 3
    assert asked == [len(sketches) - 1]  # the first client is not asked again
    assert (state.arrays["cluster"] >= 0).all()
