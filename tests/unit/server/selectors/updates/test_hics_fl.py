"""HiCS-FL: the entropy, the clusters, and the clients it prefers early and late."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from support.plain_loops import position_at
from support.populations import context, facts_of, outcome, played, population, select

from potluck.common.errors import ConfigurationError
from potluck.common.learning.output_layer import label_entropies
from potluck.server.selection import Answers, Ask, Selection
from potluck.server.selectors.updates.hics_fl import HiCSFL, cut
from potluck.server.selectors.updates.update_memory import angles, ward
from potluck.server.state import State


def test_label_entropy_is_estimated_from_the_change_of_the_output_bias() -> None:
    moves = 0.0025 * np.array([[1.0, 0, -1], [0, 0, 0], [1e9, 0, 0]])
    assert label_entropies(moves, 0.0025) == pytest.approx([0.83240, np.log(3), 0], abs=5e-6)


def test_ward_tree_is_cut_into_the_requested_number_of_clusters() -> None:
    points = np.array([0.0, 0.1, 5, 5.1, 9, 0.05])
    labels = cut(ward(np.abs(points[:, None] - points)), 3)
    assert labels[0] == labels[1] == labels[5]
    assert labels[2] == labels[3]
    assert len(set(labels.tolist())) == 3
    assert cut(ward(np.abs(points[:, None] - points)), 6).tolist() == list(range(6))


def test_angle_to_a_zero_vector_is_0() -> None:
    found = angles(np.array([[1.0, 0], [0, 2], [-3, 0], [0, 0]]))
    assert found[0] == pytest.approx([0, np.pi / 2, np.pi, 0])
    assert found[3].tolist() == [0, 0, 0, 0]


EVEN, SKEWED = [0.01, 0.0, 0.0], [0.35, 0.0, -0.3]


def learned(selector: HiCSFL, moves: np.ndarray) -> State:
    rows = np.arange(len(moves))
    everybody = Selection(rows=rows, reasons=["x"] * len(rows))
    ended = dataclasses.replace(outcome(1, everybody), facts=facts_of(moves, rows=rows))
    return selector.observe(selector.init(population(len(rows))), ended)


def share_of_even(selector: HiCSFL, number: int) -> float:
    generator = np.random.default_rng(2)
    moves = np.array([EVEN] * 10 + [SKEWED] * 10) * generator.uniform(0.9, 1.1, (20, 1))
    state, even = learned(selector, moves), 0
    for seed in range(100):
        given = context(population(20), 4, number=number, seed=seed)
        rows = select(selector, state, dataclasses.replace(given, rounds=50)).rows
        even += int((rows < 10).sum())
    return even / 400


def test_hics_fl_prefers_clients_with_even_labels_early_in_a_run() -> None:
    selector = HiCSFL(temperature=0.25, spread=10, clusters=2)
    early, late = share_of_even(selector, 2), share_of_even(selector, 50)
    assert early > 0.75
    assert late == pytest.approx(0.5, abs=0.1)


def test_hics_fl_draws_by_similarity_if_label_entropies_vary_much() -> None:
    selector = HiCSFL(temperature=0.0025)
    state = learned(selector, np.array([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0, 0, 0]] * 3))
    chosen = select(selector, state, context(population(12), 4, number=5))
    assert all(reason.startswith("drawn for place") for reason in chosen.reasons)


def test_hics_fl_refuses_more_than_3000_clients() -> None:
    federation = population(3001)
    with pytest.raises(ConfigurationError, match=r"hics-fl compares all clients .* up to 3,000"):
        select(HiCSFL(), HiCSFL().init(federation), context(federation, 3))


def test_reported_label_entropies_are_requested_once_and_replace_estimates() -> None:
    """Ten clients with even labels are preferred early, as with estimates from updates."""
    selector = HiCSFL(entropies="told", spread=9.0)
    assert (selector.needs_facts, selector.asks_questions) == (
        frozenset(),
        frozenset({"label-entropy"}),
    )
    told = np.append(np.full(10, 1.0), np.full(10, 0.2))
    told[19] = np.nan
    asked: list[list[int]] = []

    def answering(ask: Ask) -> Answers:
        assert (ask.kind, ask.trains) == ("label-entropy", True)
        assert ask.parameters == {"temperature": 0.0025}
        asked.append(ask.rows.tolist())
        rows = ask.rows[~np.isnan(told[ask.rows])]
        return Answers(rows=rows, values={"label-entropy": told[rows]})

    federation = population(20)
    state = selector.init(federation)
    even = []
    for number in range(1, 41):
        given = dataclasses.replace(context(federation, 4, number=number), rounds=40)
        selection, answers = played(selector, state, given, answering)
        even.append(float((selection.rows < 10).mean()))
        state = selector.observe(state, dataclasses.replace(outcome(number, selection, answers)))
    assert asked[0] == list(range(20))
    assert asked[1:] == [[19]] * 39, "who has not told is asked again"
    assert np.mean(even[:10]) > 0.7 > np.mean(even[-10:])


def test_hics_fl_draws_by_samples_if_reported_entropies_differ() -> None:
    selector = HiCSFL(entropies="told", spread=0.0)
    samples = np.array([1000, 1, 1, 1, 1])
    federation = dataclasses.replace(population(5), samples=samples)
    selection = select(selector, selector.init(federation), context(federation, 2))
    assert 0 in selection.rows
    assert all("drawn for place" in reason for reason in selection.reasons[:1])


def plain_entropy(move: Sequence[float], temperature: float) -> float:
    """Return the entropy of softmax(move / temperature), in nats."""
    weights = [math.exp((change - max(move)) / temperature) for change in move]
    shares = [weight / sum(weights) for weight in weights]
    return -sum(share * math.log(share) for share in shares if share > 0)


def plain_angle(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the angle of two vectors; 0 if one of them is zero."""
    lengths = math.hypot(*one) * math.hypot(*other)
    inner = sum(a * b for a, b in zip(one, other, strict=True))
    return math.acos(max(-1.0, min(1.0, inner / lengths))) if lengths else 0.0


def plain_clusters(
    entropies: Sequence[float], moves: Sequence[Sequence[float]], number: int, weight: float
) -> list[list[int]]:
    """Merge those two clusters for which Ward's criterion grows least, until `number` are left.

    The growth is that of the sum of squared distances to the centre, written with distances of
    pairs only. The distance of a pair is its angle plus `weight` times its difference of entropies.
    """

    def apart(a: int, b: int) -> float:
        return plain_angle(moves[a], moves[b]) + weight * abs(entropies[a] - entropies[b])

    def mean_square(one: list[int], other: list[int]) -> float:
        return sum(apart(a, b) ** 2 for a in one for b in other) / (len(one) * len(other))

    def growth(pair: tuple[list[int], list[int]]) -> float:
        one, other = pair
        within = (mean_square(one, one) + mean_square(other, other)) / 2
        mass = len(one) * len(other) / (len(one) + len(other))
        return mass * (mean_square(one, other) - within)

    found = [[client] for client in range(len(entropies))]
    while len(found) > number:
        one, other = min(
            ((a, b) for place, a in enumerate(found) for b in found[:place]), key=growth
        )
        found = [each for each in found if each not in (one, other)] + [sorted(one + other)]
    return found


def plain_picks(
    entropies: Sequence[float],
    clusters: Sequence[list[int]],
    places: int,
    preference: float,
    twin: np.random.Generator,
) -> list[tuple[int, int]]:
    """Return the drawn clients, each with its cluster. preference: γ(1 − t/T)."""
    left = [list(cluster) for cluster in clusters]
    chances = [math.exp(preference * statistics.mean(entropies[k] for k in c)) for c in clusters]
    picks = []
    for _ in range(places):
        still = [chance if left[c] else 0.0 for c, chance in enumerate(chances)]
        cluster = position_at(still, twin.random())
        picks.append((left[cluster].pop(int(twin.integers(len(left[cluster])))), cluster))
    return picks


def agree(
    selection: Selection,
    order: Sequence[int],
    entropies: Sequence[float],
    drawn: Sequence[tuple[int, int]],
) -> None:
    """Compare the last clients of a cohort, and their reasons, with the second implementation."""
    first = len(selection.rows) - len(drawn)
    assert selection.rows[first:].tolist() == [order[position] for position, _ in drawn]
    for reason, (position, cluster) in zip(selection.reasons[first:], drawn, strict=True):
        assert reason.startswith(f"cluster {cluster + 1} of ")
        assert float(reason.split()[-1]) == pytest.approx(entropies[position], abs=0.0051)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("clusters", "entropy_weight"), [(None, 10.0), (2, 0.5), (4, 3.0)])
def test_rounds_agree_with_a_second_implementation(
    clusters: int | None, entropy_weight: float, seed: int
) -> None:
    selector = HiCSFL(temperature=0.5, clusters=clusters, entropy_weight=entropy_weight)
    generator, federation = np.random.default_rng(seed), population(9)
    state, moves = selector.init(federation), dict[int, list[float]]()
    picked, kinds = set[int](), Counter[str]()
    for number in range(1, 17):
        here = np.flatnonzero(generator.random(9) < 0.9)
        given = context(federation, 3, number=number, seed=seed, available=here)
        selection = select(selector, state, dataclasses.replace(given, rounds=16))
        twin = given.generator("hics-fl")
        new = np.array([row for row in here if row not in picked])
        cohort = twin.choice(new, size=min(3, len(new)), replace=False).tolist()
        assert selection.rows[: len(cohort)].tolist() == cohort
        order = [row for row in twin.permutation(here).tolist() if row in moves]
        order, places = [row for row in order if row not in cohort], 3 - len(cohort)
        entropies = [plain_entropy(moves[row], 0.5) for row in order]
        if not places or len(order) <= places:
            kinds["all"] += 1
            assert set(order[:places]) <= set(selection.rows.tolist())
        elif statistics.pvariance(entropies) >= 0.1:
            kinds["by similarity"] += 1
            assert selection.reasons[-1].startswith("drawn for place")
        else:
            kinds["clusters"] += 1
            wanted = min(clusters or places, len(order))
            last = [moves[row] for row in order]
            found = plain_clusters(entropies, last, wanted, entropy_weight)
            drawn = plain_picks(entropies, found, places, 4 * (1 - number / 16), twin)
            agree(selection, order, entropies, drawn)

        arrived = selection.rows[generator.random(len(selection.rows)) < 0.9]
        size = 2.0 if number == 10 else 0.3
        table = (size * generator.normal(size=(len(arrived), 3))).astype(np.float32)
        table[arrived == 0] = 0
        table[arrived == 1] = [0.5, 0.25, 0]
        ended = dataclasses.replace(
            outcome(number, selection), included=arrived, facts=facts_of(table, rows=arrived)
        )
        state = selector.observe(state, ended)
        picked.update(selection.rows.tolist())
        moves.update(zip(arrived.tolist(), table.astype(np.float64).tolist(), strict=True))
    assert kinds["clusters"] >= 6
    assert kinds["by similarity"] >= 1


def test_rounds_with_reported_entropies_agree_with_a_second_implementation() -> None:
    """Clients are clustered by Ĥ only; some have equal ones, and two never answer."""
    selector, federation = HiCSFL(entropies="told", spread=9.0, clusters=4), population(11)
    told = dict(enumerate([0.9, 0.35, 1.4, 0.31, 0.9, 1.1, 0.2, 1.42, 0.9]))

    def answering(ask: Ask) -> Answers:
        rows = ask.rows[ask.rows < 9]
        values = np.array([told[row] for row in rows.tolist()])
        return Answers(rows=rows, values={"label-entropy": values})

    state = selector.init(federation)
    for number in range(1, 13):
        given = dataclasses.replace(context(federation, 5, number=number), rounds=12)
        selection, answers = played(selector, state, given, answering)
        twin = given.generator("hics-fl")
        order = [row for row in twin.permutation(given.available).tolist() if row in told]
        entropies = [told[row] for row in order]
        found = plain_clusters(entropies, [()] * 9, 4, 10)
        drawn = plain_picks(entropies, found, 5, 4 * (1 - number / 12), twin)
        agree(selection, order, entropies, drawn)
        state = selector.observe(state, outcome(number, selection, answers))
