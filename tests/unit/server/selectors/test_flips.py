import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from sklearn.cluster import KMeans
from support.populations import context, labelled, outcome, population, rounds, select

from potluck.client.disclosure.laplace import noisy_counts
from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Floats, Population, Rows, Selector
from potluck.server.selectors.flips import Flips, clusters_of, davies_bouldin
from potluck.server.state import State

KINDS = [0] * 6 + [1] * 3 + [2] * 2
"""The kind of labels that each of eleven clients has."""
FEDERATION = labelled([[[9, 1, 0], [0, 18, 2], [3, 0, 27]][kind] for kind in KINDS])


def kinds(rows: list[int]) -> list[int]:
    return [KINDS[row] for row in rows]


def after(
    selections: list[int] | None = None, failed: list[int] | None = None, clients: int = 11
) -> State:
    counts = selections or [0] * clients
    return State(
        arrays={"selections": np.array(counts), "failed": np.array(failed or [], dtype=np.int64)}
    )


def test_clusters_are_the_kinds_of_labels() -> None:
    """The number of clusters may be given or is found; clients' sizes do not matter."""
    for given in (None, 3):
        found = clusters_of(FEDERATION, given).tolist()
        assert len(set(zip(found, KINDS, strict=True))) == len(set(found)) == 3


def test_every_cluster_gets_the_same_number_of_places() -> None:
    for seed in range(5):
        chosen = select(Flips(), after(), context(FEDERATION, 6, seed=seed)).rows.tolist()
        assert sorted(kinds(chosen[:3])) == sorted(kinds(chosen[3:])) == [0, 1, 2]


def test_a_small_cluster_leaves_its_places_to_the_others() -> None:
    chosen = select(Flips(), after(), context(FEDERATION, 9)).rows.tolist()
    assert Counter(kinds(chosen)) == {0: 4, 1: 3, 2: 2}


def test_places_that_remain_go_to_the_clusters_selected_least() -> None:
    selections = [1, 0, 0, 0, 0, 0, 2, 2, 0, 0, 3]
    for seed in range(5):
        chosen = select(Flips(), after(selections), context(FEDERATION, 4, seed=seed))
        assert Counter(kinds(chosen.rows.tolist())) == {0: 2, 1: 1, 2: 1}
        assert 8 in chosen.rows
        assert 9 in chosen.rows
        assert 0 not in chosen.rows


def plain(selections: list[int], cluster: list[int], count: int) -> list[int]:
    """Return the cluster of each place; each turn takes the one with the fewest places so far."""
    left = Counter(cluster)
    past: Counter[int] = Counter()
    for kind, times in zip(cluster, selections, strict=True):
        past[kind] += times
    places: Counter[int] = Counter()
    order = []
    for _ in range(count):
        best = min((k for k in left if left[k]), key=lambda k: (places[k], past[k]))
        order.append(best)
        left[best] -= 1
        places[best] += 1
    return order


def test_clusters_take_turns_as_in_a_simple_reference_loop() -> None:
    generator = np.random.default_rng(2)
    cluster = clusters_of(FEDERATION, 3)
    for count in range(1, 12):
        selections = generator.permutation(11).tolist()  # no two clusters have equal sums
        chosen = select(Flips(), after(selections), context(FEDERATION, count)).rows
        expected = plain(selections, cluster.tolist(), count)
        assert cluster[chosen].tolist() == expected
        for kind in set(expected):
            members = [selections[row] for row in chosen.tolist() if cluster[row] == kind]
            assert (
                members
                == sorted(
                    s for s, k in zip(selections, cluster.tolist(), strict=True) if k == kind
                )[: len(members)]
            )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("clusters", [None, 3])
def test_rounds_agree_with_a_second_implementation(
    clusters: int | None, spares: int, seed: int
) -> None:
    """Some clients are unavailable, some updates fail, clients 11 and 12 have no labels, and
    clients 13 and 14 join in round 5. Numbers of clusters are arbitrary, and read from the code."""
    generator, selector = np.random.default_rng(seed), Flips(clusters=clusters)
    labels: list[list[float]] = [[9, 1, 0], [0, 18, 2], [3, 0, 27]]
    counts = [labels[kind] for kind in KINDS]
    counts += [[0, -1, 0], [np.nan] * 3, [18, 2, 0], [1, 0, 9]]
    kind = dict(enumerate(KINDS)) | {13: 0, 14: 2}
    state, failed = selector.init(labelled(counts[:13])), list[int]()
    selections, for_failed = [0] * 15, 0
    for number in range(1, 21):
        federation = labelled(counts[: 15 if number >= 5 else 13])
        here = np.flatnonzero(generator.random(len(federation)) < 0.6)
        given = context(federation, 6, number=number, seed=seed, available=here)
        selection = select(selector, state, replace(given, spares=spares))

        names = clusters_of(federation, clusters).tolist()
        name = {row: names[row] for row in kind if row < len(federation)}
        assert len(set(name.values())) == len({(kind[row], name[row]) for row in name}) == 3
        twin = given.generator("flips")
        order = [row for row in twin.permutation(here).tolist() if row in name]
        ties = twin.random(3).tolist() if order else []
        queues = {
            c: sorted((row for row in order if name[row] == c), key=lambda row: selections[row])
            for c in range(3)
        }
        past = {c: sum(selections[row] for row in name if name[row] == c) for c in range(3)}
        troubled, places = {name[row] for row in failed if row in name}, dict.fromkeys(range(3), 0)
        expected, size = list[int](), min(6, len(here))
        for place in range(min(size, len(order))):
            able = [c for c in range(3) if queues[c]]
            if place >= size - spares and troubled & set(able):
                able = [c for c in able if c in troubled]
                for_failed += 1
            best = min(able, key=lambda c: (places[c], past[c], ties[c]))
            expected.append(queues[best].pop(0))
            places[best] += 1
        rest = [row for row in here.tolist() if row not in expected]
        if len(expected) < size:
            expected += twin.choice(np.array(rest), size - len(expected), replace=False).tolist()
        assert selection.rows.tolist() == expected

        came = generator.random(size) < 0.8
        ended = replace(outcome(number, selection), included=selection.rows[came])
        state, failed = selector.observe(state, ended), selection.rows[~came].tolist()
        for row in expected:
            selections[row] += 1
    assert (for_failed > 5) == (spares > 0)


def test_all_clients_of_a_cluster_take_turns() -> None:
    times: Counter[int] = Counter()
    for selection in rounds(Flips(), FEDERATION, 3, 12):
        times.update(selection.rows.tolist())
    assert [times[row] for row in range(11)] == [2] * 6 + [4] * 3 + [6] * 2


def test_spare_places_go_to_clusters_whose_clients_failed() -> None:
    wanted = replace(context(FEDERATION, 6), spares=3)
    state = after(failed=[6, 8])
    chosen = select(Flips(), state, wanted)
    assert sorted(kinds(chosen.rows[:3].tolist())) == [0, 1, 2]
    assert kinds(chosen.rows[3:].tolist())[:2] == [1, 1]
    assert chosen.reasons[3].endswith("where clients were missing in the last round")
    assert chosen.reasons[5].endswith("in turn")  # cluster 1 has no client left


def test_clients_that_failed_are_remembered_for_one_round() -> None:
    selector = Flips()
    state = selector.init(FEDERATION)
    selection = select(selector, state, context(FEDERATION, 4))
    ended = replace(outcome(1, selection), included=selection.rows[:3])
    state = selector.observe(state, ended)
    assert state.arrays["failed"].tolist() == [selection.rows[3]]
    assert state.arrays["selections"].sum() == 4
    state = selector.observe(state, outcome(2, selection))
    assert state.arrays["failed"].tolist() == []


def test_clients_without_samples_or_profile_come_last() -> None:
    federation = labelled([[0.0, 0.0], [3.0, 4.0], [np.nan, np.nan], [-5.0, -2.0], [9.0, 1.0]])
    found = select(Flips(), after(clients=5), context(federation, 4))
    assert set(found.rows[:2].tolist()) == {1, 4}
    assert found.reasons[2] == found.reasons[3] == "no label counts; drawn uniformly"


@pytest.mark.parametrize("clusters", [None, 3])
@pytest.mark.parametrize("seed", range(3))
def test_clusters_from_noisy_label_counts_are_covered(clusters: int | None, seed: int) -> None:
    """Noise as with `disclosure = "noisy"`, ε = 1. The last of three kinds of clients is rare."""
    randomness, kind = random.Random(seed), [0] * 24 + [1] * 16 + [2] * 6
    exact = [[[40, 0, 0, 5], [0, 30, 30, 0], [0, 0, 2, 50]][each] for each in kind]
    noisy: list[list[float]] = [
        [*noisy_counts(counts, epsilon=1.0, adjacency="replace", randomness=randomness)]
        for counts in exact
    ]
    assert noisy != exact
    assert min(map(min, noisy)) < 0
    kind.append(1)
    noisy.append([-9, 5, 5, -1])  # of the second kind, because negative counts are read as 0
    noisy.extend([[-3, 0, -1, 0], [0, 0, 0, 0]])

    federation, selector = labelled(noisy), Flips(clusters=clusters)
    found = clusters_of(federation, clusters).tolist()
    assert found[47:] == [-1, -1], "no count is above 0"
    assert len(set(zip(found[:47], kind, strict=True))) == len(set(found[:47])) == 3
    for selection in rounds(selector, federation, 6, 8, seed=seed):
        assert Counter(kind[row] for row in selection.rows.tolist()) == {0: 2, 1: 2, 2: 2}
    everyone = select(selector, after(clients=49), context(federation, 49, seed=seed))
    assert set(everyone.rows[47:].tolist()) == {47, 48}


def plain_index(points: Floats, centres: Floats) -> float:
    groups: dict[int, list[int]] = {}
    for place, point in enumerate(points):
        nearest = min(range(len(centres)), key=lambda c: float(np.linalg.norm(point - centres[c])))
        groups.setdefault(nearest, []).append(place)
    spread = {
        c: float(np.mean([np.linalg.norm(points[p] - centres[c]) for p in members]))
        for c, members in groups.items()
    }
    worst = [
        max(
            (spread[a] + spread[b]) / float(np.linalg.norm(centres[a] - centres[b]))
            for b in groups
            if b != a
        )
        for a in groups
    ]
    return float(np.mean(worst))


def test_the_index_of_clusters_is_that_of_the_definition() -> None:
    generator = np.random.default_rng(4)
    for count in (2, 3, 5):
        points, centres = generator.dirichlet([0.4] * 4, 30), generator.dirichlet([1] * 4, count)
        assert davies_bouldin(points, centres) == pytest.approx(plain_index(points, centres))
    assert davies_bouldin(points, centres[:1]) == np.inf


@pytest.mark.parametrize("kinds_of_labels", [5, 7, 8])
def test_the_number_of_clusters_has_the_smallest_index(kinds_of_labels: int) -> None:
    """Compared with scikit-learn's k-means and the definition's index, for 2 to 10 clusters."""
    generator = np.random.default_rng(kinds_of_labels)
    kind = np.repeat(np.arange(kinds_of_labels), 8)
    counts = 60 * np.eye(kinds_of_labels)[kind] + generator.integers(
        0, 9, (len(kind), len(set(kind)))
    )
    points = counts / counts.sum(axis=1, keepdims=True)
    indices = {}
    for count in range(2, 11):
        tries = [KMeans(count, random_state=seed).fit(points) for seed in range(20)]
        fitted = max(tries, key=lambda each: float(each.score(points)))
        indices[count] = plain_index(points, fitted.cluster_centers_)
    assert min(indices, key=lambda count: indices[count]) == kinds_of_labels
    found = clusters_of(labelled(counts.tolist()), None)
    assert len(set(zip(found.tolist(), kind.tolist(), strict=True))) == kinds_of_labels
    assert len(set(found.tolist())) == kinds_of_labels


def many(clients: int) -> tuple[Population, Rows]:
    generator = np.random.default_rng(1)
    kind = generator.integers(4, size=clients)
    counts = 50 * np.eye(4)[kind] + generator.integers(0, 3, (clients, 4))
    return population(clients, classes=4, label_counts=counts), kind


def test_clusters_of_many_clients_come_from_a_sample() -> None:
    federation, kind = many(5000)
    found = clusters_of(federation, None)
    assert len(set(zip(found.tolist(), kind.tolist(), strict=True))) == 4
    chosen = select(Flips(), after(clients=5000), context(federation, 8)).rows
    assert Counter(kind[chosen].tolist()) == dict.fromkeys(range(4), 2)


@pytest.mark.parametrize("clusters", [0, 1001, 2.5])
def test_options_are_checked(clusters: object) -> None:
    with pytest.raises(ConfigurationError, match="'clusters'"):
        create(Selector, "flips", {"clusters": clusters})
