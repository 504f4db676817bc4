"""HCSFed against a second implementation, over several rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.plain_loops import limited
from support.populations import context, outcome, played, population

from potluck.common.settings.plugins import create
from potluck.server.selection import Answers, Ask, Selector

NAMES = ("sketch-1", "sketch-2")
Point = Sequence[float]


def partitions(count: int, clusters: int) -> Iterator[list[int]]:
    """Yield every partition of `count` points into this number of clusters, as their labels."""

    def longer(labels: list[int]) -> Iterator[list[int]]:
        used = max(labels, default=-1) + 1
        if len(labels) == count:
            yield from [labels] * (used == clusters)
            return
        for label in range(min(used + 1, clusters)):
            yield from longer([*labels, label])

    yield from longer([])


def best_partition(points: Sequence[Point], clusters: int) -> list[list[Point]]:
    """Return the clusters with the least sum of squared distances to their means, by trying all."""
    apart = [[math.dist(one, other) ** 2 for other in points] for one in points]

    def groups(labels: Sequence[int]) -> list[list[int]]:
        return [
            [place for place, label in enumerate(labels) if label == cluster]
            for cluster in range(clusters)
        ]

    def spread(labels: Sequence[int]) -> float:
        return sum(
            sum(apart[a][b] for a in group for b in group) / len(group) for group in groups(labels)
        )

    least = min(partitions(len(points), clusters), key=spread)
    return [[points[place] for place in group] for group in groups(least)]


class PlainHcsFed:
    """HCSFed in plain loops. cluster, sketches: of each client that sent a valid sketch. As long as
    there are fewer clusters than `clusters`, they are made again from all sketches."""

    def __init__(self, clusters: int) -> None:
        self.clusters = clusters
        self.centres: list[Point] = []
        self.cluster, self.sketches = dict[int, int](), dict[int, Point]()

    def hear(self, answers: Mapping[int, Point]) -> None:
        valid = {row: z for row, z in answers.items() if all(math.isfinite(each) for each in z)}
        lengths = {row: math.hypot(*z) for row, z in valid.items()}
        for row, length in limited(lengths, 100).items():
            self.sketches[row] = [each * length / lengths[row] for each in valid[row]]
        placed = list(valid)
        if len(self.centres) < self.clusters and valid:
            placed = list(self.sketches)
            points = [self.sketches[row] for row in placed]
            self.centres = [
                [sum(column) / len(group) for column in zip(*group, strict=True)]
                for group in best_partition(points, min(self.clusters, len(points)))
            ]
        for row in placed:
            far = [math.dist(self.sketches[row], centre) for centre in self.centres]
            self.cluster[row] = far.index(min(far))

    def equal(self, sizes: Sequence[int], count: int, number: int) -> list[int]:
        seats = [count // len(sizes)] * len(sizes)
        for turn in range(count % len(sizes)):
            seats[(number - 1 + turn) % len(sizes)] += 1
        return seats

    def neyman(self, groups: Sequence[Sequence[int]], count: int) -> list[int]:
        weights = []
        for group in groups:
            far = [
                math.dist(self.sketches[row], self.centres[self.cluster[row]]) ** 2 for row in group
            ]
            weights.append(len(group) * math.sqrt(sum(far) / len(far)) if far else 0.0)
        if max(weights) < 1e-9:
            weights = [float(len(group)) for group in groups]
        shares = [count * weight / sum(weights) for weight in weights]
        seats = [math.floor(share + 1e-9) for share in shares]
        order = sorted(range(len(seats)), key=lambda h: seats[h] - shares[h])
        for place in order[: count - sum(seats)]:
            seats[place] += 1
        return seats


def within(seats: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Move the seats that a cluster cannot fill to the largest cluster with room, one by one."""
    found = [min(seat, size) for seat, size in zip(seats, sizes, strict=True)]
    for _ in range(sum(seats) - sum(found)):
        room = [place for place, size in enumerate(sizes) if found[place] < size]
        found[max(room, key=lambda place: (sizes[place], -place))] += 1
    return found


def plain_draw(lengths: Sequence[float], size: int, twin: np.random.Generator) -> list[int]:
    """Draw positions without replacement: those whose exponential waiting times, with the lengths
    as rates, end first."""
    first = twin.exponential(size=(2, len(lengths))).tolist()[0]
    waits = [wait / length for wait, length in zip(first, lengths, strict=True)]
    return sorted(range(len(waits)), key=lambda place: waits[place])[:size]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at_first", [1, 2, 8])
@pytest.mark.parametrize("seats", ["equal", "neyman"])
def test_rounds_agree_with_a_second_implementation(seats: str, at_first: int, seed: int) -> None:
    """Some clients are unavailable, and some send no sketch, half of one or one that is too long.
    Clients 8 and 9 join in round 4. at_first: number of clients in round 1; after one or two, the
    clusters are made again. The number of each cluster is read from the state, because it is
    arbitrary."""
    generator, federation = np.random.default_rng(seed), population(10)
    selector = create(Selector, "hcsfed", {"clusters": 3, "seats": seats, "numbers": 2})
    plain, state = PlainHcsFed(3), selector.init(population(8))
    middles = np.array([[0, 0], [7, 0], [0, 7]])[generator.integers(3, size=10)]
    table = generator.standard_normal((10, 2)) + middles
    table[3] *= 10 ** (3 * (seed % 2))
    asked, sizes_seen = list[list[int]](), set[int]()

    def answering(ask: Ask) -> Answers:
        assert (ask.kind, tuple(ask.names), ask.trains) == ("sketch", NAMES, True)
        asked.append(ask.rows.tolist())
        rows = ask.rows[generator.random(len(ask.rows)) < 0.9]
        told = table[rows].copy()
        told[generator.random(len(rows)) < 0.1, 1] = np.nan
        return Answers(rows=rows, values=dict(zip(NAMES, told.T, strict=True)))

    for number in range(1, 16):
        clients = at_first if number == 1 else 10 if number >= 4 else 8
        here = np.flatnonzero(generator.random(clients) < (1 if number == 1 else 0.7))
        given = context(federation, 5, number=number, seed=seed, available=here)
        selection, answers = played(selector, state, given, answering)
        unknown = [row for row in here.tolist() if row not in plain.cluster]
        assert asked == ([unknown] if unknown else [])
        asked.clear()
        for each in answers:
            told = np.stack(list(each.values.values()), axis=1).tolist()
            plain.hear(dict(zip(each.rows.tolist(), told, strict=True)))
        included = selection.rows[generator.random(len(selection.rows)) < 0.8]
        ended = outcome(number, selection, answers=answers)
        state = selector.observe(state, replace(ended, included=included))

        stored = state.arrays["cluster"].tolist()
        assert [row for row, cluster in enumerate(stored) if cluster >= 0] == sorted(plain.cluster)
        lengths = {row: state.arrays["length"][row] for row in plain.cluster}
        assert lengths == pytest.approx({row: math.hypot(*plain.sketches[row]) for row in lengths})
        named = {(stored[row], cluster) for row, cluster in plain.cluster.items()}
        numbers = dict(named)
        assert len(named) == len(numbers) == len(set(numbers.values())) == len(plain.centres)
        groups = [
            [row for row in here.tolist() if plain.cluster.get(row) == numbers[place]]
            for place in range(len(numbers))
        ]
        sizes = [len(group) for group in groups]
        count = min(5, sum(sizes))
        shares = [0] * len(groups)
        if count:
            shares = (
                plain.equal(sizes, count, number)
                if seats == "equal"
                else plain.neyman(groups, count)
            )
        twin, expected = given.generator("hcsfed"), list[int]()
        for group, places in zip(groups, within(shares, sizes), strict=True):
            if seats == "equal":
                drawn = twin.choice(len(group), size=places, replace=False).tolist()
            else:
                drawn = plain_draw([lengths[row] for row in group], places, twin)
            expected += [group[place] for place in drawn]
            sizes_seen.add(places)
        rest = [row for row in here.tolist() if row not in expected]
        missing = min(5, len(here)) - len(expected)
        expected += twin.choice(np.array(rest), missing, replace=False).tolist() if rest else []
        assert selection.rows.tolist() == expected
    assert len(plain.centres) == 3
    assert len(sizes_seen) > 2
