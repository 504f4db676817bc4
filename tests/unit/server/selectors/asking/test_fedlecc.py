from collections import defaultdict

import numpy as np
import pytest
from numpy.typing import ArrayLike
from support.populations import Respond, context, labelled, outcome, played, population, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Answers, Ask, Selector
from potluck.server.selectors.asking.fedlecc import (
    FedLecc,
    linkage_clusters,
    square_roots,
    turns,
)

THREE_KINDS = [[9, 1, 0]] * 4 + [[0, 9, 1]] * 3 + [[1, 0, 9]] * 2


def answering(losses: ArrayLike) -> Respond:
    told = np.array(losses, dtype=np.float64)

    def respond(ask: Ask) -> Answers:
        assert ask.kind == "loss"
        return Answers(rows=ask.rows, values={"loss": told[ask.rows]})

    return respond


def chosen(losses: ArrayLike, count: int, *, seed: int = 0) -> list[int]:
    given, selector = labelled(THREE_KINDS), FedLecc(clusters=3)
    state = selector.init(given)
    rows = select(selector, state, context(given, count, seed=seed), answering(losses)).rows
    found: list[int] = rows.tolist()
    return found


def test_distances_of_label_square_roots_are_hellinger_distances() -> None:
    one, other = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.1, 0.8])
    roots = square_roots(np.stack([10 * one, 7 * other]))
    hellinger = np.sqrt(1 - np.sqrt(one * other).sum())
    assert np.linalg.norm(roots[0] - roots[1]) / 2**0.5 == pytest.approx(hellinger)
    assert square_roots(np.array([[-3.0, 4, 0]])).tolist() == [[0, 1, 0]]


def average_linkage(
    points: np.ndarray[tuple[int, int], np.dtype[np.float64]], clusters: int
) -> set[frozenset[int]]:
    """Return clusters of rows: merge the two nearest on average until `clusters` are left."""
    groups = [frozenset([row]) for row in range(len(points))]

    def apart(a: frozenset[int], b: frozenset[int]) -> float:
        return float(np.mean([np.linalg.norm(points[i] - points[j]) for i in a for j in b]))

    while len(groups) > clusters:
        pairs = [(a, b) for i, a in enumerate(groups) for b in groups[i + 1 :]]
        a, b = min(pairs, key=lambda pair: apart(*pair))
        groups = [each for each in groups if each not in (a, b)] + [a | b]
    return set(groups)


def test_fedlecc_clusters_equal_average_linkage() -> None:
    generator = np.random.default_rng(0)
    for _ in range(5):
        roots = square_roots(generator.dirichlet([0.3] * 4, 14))
        members = defaultdict(set)
        for row, label in enumerate(linkage_clusters(roots, 4)):
            members[label].add(row)
        assert {frozenset(each) for each in members.values()} == average_linkage(roots, 4)


def test_clusters_with_the_highest_mean_loss_take_turns_by_largest_client_loss() -> None:
    """The clusters' mean losses are 2, 3 and 2.5: the second comes first, then the third."""
    losses = [1.0, 4.0, 2.0, 1.0, 3.5, 2.0, 3.5, 2.0, 3.0]
    order = chosen(losses, 9)
    assert set(order[:1]) <= {4, 6}
    assert order[1:3] == [8, 1]
    assert order[3] in (4, 6)
    assert order[4:7] == [7, 2, 5]
    assert sorted(order[7:]) == [0, 3]


def plain_turns(losses: list[float], cluster: list[int], count: int) -> list[int]:
    groups: dict[int, list[int]] = defaultdict(list)
    for row, label in enumerate(cluster):
        groups[label].append(row)
    ranked = sorted(groups.values(), key=lambda rows: -float(np.mean([losses[r] for r in rows])))
    for rows in ranked:
        rows.sort(key=lambda row: -losses[row])
    found: list[int] = []
    while any(ranked):
        found += [rows.pop(0) for rows in ranked if rows]
    return found[:count]


def test_cluster_turns_equal_those_of_a_plain_loop() -> None:
    generator = np.random.default_rng(1)
    for count in range(1, 25):
        losses, cluster = generator.random(20), generator.choice([0, 2, 3, 7], 20)
        found = turns(losses, cluster, count, np.random.default_rng(0)).tolist()
        assert found == plain_turns(losses.tolist(), cluster.tolist(), count)


def test_fedlecc_draws_among_clients_with_equal_losses_at_random() -> None:
    assert {chosen([1.0] * 9, 1, seed=seed)[0] for seed in range(80)} == set(range(9))


def test_client_without_an_answer_keeps_its_last_loss() -> None:
    given, selector = labelled(THREE_KINDS), FedLecc(clusters=1)
    first = context(given, 1)
    selection, answers = played(
        selector, selector.init(given), first, answering([1, 2, 3, 4, 5, 6, 7, 8, 9])
    )
    state = selector.observe(selector.init(given), outcome(1, selection, answers))
    later = context(given, 2, number=2)
    nonsense = [np.nan] * 7 + [-1.0, 0.5]
    assert select(selector, state, later, answering(nonsense)).rows.tolist() == [7, 6]


def test_new_client_gets_a_cluster_and_client_without_labels_is_selected_last() -> None:
    """The run began before any client had disclosed anything."""
    selector = FedLecc(clusters=3)
    state = selector.init(population(0, classes=3, label_counts=np.zeros((0, 3))))
    grown = labelled([*THREE_KINDS, [0, 8, 2], [np.nan] * 3])
    losses = [1.0] * 4 + [2, 2, 2] + [1, 1] + [9, 9]
    selection = select(selector, state, context(grown, 11, number=2), answering(losses))
    assert selection.rows[0] == 9
    assert selection.reasons[0].endswith("whose mean is 3.75")
    assert selection.rows[-1] == 10
    assert "no labels or no loss known" in selection.reasons[-1]


def test_fedlecc_clusters_a_sample_of_5000_clients_correctly() -> None:
    """Clients have one of three kinds of labels, with noise; each kind has its own loss."""
    generator = np.random.default_rng(2)
    kinds = generator.integers(3, size=5000)
    counts = 100 * np.eye(3)[kinds] + generator.integers(0, 3, (5000, 3))
    given, selector = population(5000, classes=3, label_counts=counts), FedLecc(clusters=3)
    losses = 1.0 + kinds
    selection = select(selector, selector.init(given), context(given, 6), answering(losses))
    assert kinds[selection.rows].tolist() == [2, 1, 0, 2, 1, 0]
    assert selection.reasons[0].endswith("whose mean is 3")


@pytest.mark.parametrize("clusters", [0, 1001, 2.5])
def test_fedlecc_option_out_of_range_is_refused(clusters: object) -> None:
    with pytest.raises(ConfigurationError, match="'clusters'"):
        create(Selector, "fedlecc", {"clusters": clusters})
