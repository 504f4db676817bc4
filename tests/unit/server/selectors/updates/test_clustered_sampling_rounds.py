"""Clustered sampling against a second implementation of both algorithms, over several rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform
from support.plain_loops import position_at
from support.populations import context, facts_of, outcome, population, select

from potluck.common.settings.plugins import create
from potluck.server.selection import Selector

Units = Mapping[int, Fraction]
"""Expected number of draws of each client, in the order in which ties are broken."""
Places = list[dict[int, Fraction]]
"""For each place, its probabilities."""


def plain_by_size(units: Units, count: int) -> Places:
    """Pour the clients' units into places of capacity 1, the largest clients first."""
    places: Places = [{} for _ in range(count)]
    place, room = 0, Fraction(1)
    for row in sorted(units, key=lambda row: -units[row]):
        left = units[row]
        while left:
            part = min(left, room)
            places[place][row] = part
            left, room = left - part, room - part
            if not room:
                place, room = place + 1, Fraction(1)
    return places


def plain_angle(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    inner = sum(a * b for a, b in zip(one, other, strict=True))
    return math.acos(max(-1.0, min(1.0, inner / lengths))) if lengths else 0.0


def plain_merges(apart: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return Ward's merges: each time, those two clusters for which the sum of squared distances
    to the centres grows least. Merge m makes cluster n + m."""

    def mean_square(one: Sequence[int], other: Sequence[int]) -> float:
        return sum(apart[a][b] ** 2 for a in one for b in other) / (len(one) * len(other))

    def growth(pair: tuple[int, int]) -> float:
        one, other = found[pair[0]], found[pair[1]]
        within = (mean_square(one, one) + mean_square(other, other)) / 2
        mass = len(one) * len(other) / (len(one) + len(other))
        return mass * (mean_square(one, other) - within)

    found, merges = {place: [place] for place in range(len(apart))}, list[tuple[int, int]]()
    while len(found) > 1:
        one, other = min(((a, b) for a in found for b in found if a < b), key=growth)
        found[len(apart) + len(merges)] = found.pop(one) + found.pop(other)
        merges.append((one, other))
    return merges


def plain_by_updates(units: Units, last: Mapping[int, Sequence[float]], count: int) -> Places:
    """Give the largest clusters a place each, and fill these up with the other clusters' clients.
    last: last update of each client that sent any."""
    places: Places = []
    for row, mass in units.items():  # clients that fill whole places
        places += [{row: Fraction(1)}] * math.floor(mass)
    left = {row: mass - math.floor(mass) for row, mass in units.items() if mass.denominator > 1}
    rows = list(left)
    apart = [
        [plain_angle(last[a], last[b]) if {a, b} <= set(last) and a != b else 0.0 for b in rows]
        for a in rows
    ]
    merges = plain_merges(apart)
    if not set(rows) <= set(last) and len(rows) > 1:  # equal distances: the order is SciPy's
        tree = linkage(squareform(np.array(apart)), "ward")
        merges = [(int(a), int(b)) for a, b in tree[:, :2]]
    clusters = {place: [row] for place, row in enumerate(rows)}
    for number, (one, other) in enumerate(merges, len(rows)):  # cut as high as masses allow
        if one in clusters and other in clusters:
            both = clusters[one] + clusters[other]
            if sum(left[row] for row in both) <= 1:
                del clusters[one], clusters[other]
                clusters[number] = both
    ranked = sorted(clusters.values(), key=lambda rows: -sum(left[row] for row in rows))
    free = count - len(places)
    opened = [{row: left[row] for row in cluster} for cluster in ranked[:free]]
    for row in [row for cluster in ranked[free:] for row in cluster]:
        for place in opened:
            part = min(left[row], 1 - sum(place.values(), Fraction(0)))
            if part:
                place[row] = part
                left[row] -= part
    return places + opened


def plain_waits(sizes: Mapping[int, Fraction], count: int, twin: np.random.Generator) -> list[int]:
    """Draw without replacement: the clients whose waiting times, with rate ∝ size, end first."""
    first = twin.exponential(size=(2, len(sizes))).tolist()[0]
    waits = {row: first[place] / float(size) for place, (row, size) in enumerate(sizes.items())}
    return sorted(waits, key=lambda row: waits[row])[:count]


def plain_picks(
    places: Places, sizes: Units, repeats: bool, twin: np.random.Generator
) -> tuple[dict[int, int], list[float]]:
    """Draw a client for each place. Return the clients with their number of draws, and the shares
    of the drawn clients in their places. repeats: a client may be drawn twice."""
    draws, shares = dict[int, int](), list[float]()
    for place in places:
        free = [0.0 if row in draws and not repeats else float(place[row]) for row in place]
        if not any(free):
            continue
        row = list(place)[position_at(free, twin.random())]
        if row not in draws:
            shares.append(float(place[row]))
        draws[row] = draws.get(row, 0) + 1
    missing = len(places) - len(draws)
    if missing and not repeats:
        others = {row: size for row, size in sizes.items() if row not in draws}
        draws |= dict.fromkeys(plain_waits(others, missing, twin), 1)
    return draws, shares


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clients", [3, 7, 14])
@pytest.mark.parametrize(
    "options",
    [
        {"by": "size"},
        {"by": "size", "unbiased": True},
        {"by": "updates"},
        {"by": "updates", "unbiased": True},
        {"by": "updates", "weights": "samples"},
    ],
)
def test_rounds_agree_with_a_second_implementation(
    options: dict[str, Any], clients: int, seed: int
) -> None:
    """Some clients are unavailable, some updates fail, and one client is much larger than the
    others. All are selected in round 3. A client's number of samples is known after its first
    update."""
    generator, by_size = np.random.default_rng(seed), options["by"] == "size"
    sizes, repeats = generator.integers(1, 1000, clients), options.get("unbiased", False)
    sizes[1] += 400 * clients
    selector = create(Selector, "clustered-sampling", options)
    state, known = selector.init(population(clients)), np.zeros(clients, dtype=np.int64)
    last = dict[int, list[float]]()
    for number in range(1, 13):
        here = np.flatnonzero(generator.random(clients) < 0.9)
        federation = replace(population(clients), samples=known.copy())
        wanted = clients if number == 3 else 4
        given = context(federation, wanted, number=number, seed=seed, available=here)
        selection = select(selector, state, given)
        twin, count = given.generator("clustered-sampling"), min(wanted, len(here))
        order = twin.permutation(here).tolist()
        told = [Fraction(int(known[row])) for row in order if known[row]]
        usual = sum(told, Fraction(0)) / len(told) if told else Fraction(1)
        samples = {row: Fraction(int(known[row])) or usual for row in order}
        total = sum(samples.values(), Fraction(0))
        units = {row: count * n / total for row, n in samples.items()}
        places = plain_by_size(units, count) if by_size else plain_by_updates(units, last, count)
        assert all(sum(place.values()) == 1 for place in places)
        draws, shares = plain_picks(places, samples, repeats, twin)
        assert selection.rows.tolist() == list(draws)
        reported = [float(reason.split()[-1]) for reason in selection.reasons[: len(shares)]]
        assert reported == pytest.approx(shares, abs=0.0051)
        if "weights" in options:
            assert selection.weights is None
        else:
            assert selection.weights is not None
            weights = dict(zip(selection.rows.tolist(), selection.weights, strict=True))
            if len(draws) == len(here) and not repeats:
                everyone = known[known > 0].mean() if known.any() else 1.0
                assert weights == pytest.approx({r: known[r] or everyone for r in draws})
            else:
                assert weights == draws

        rows = selection.rows[generator.random(len(selection.rows)) < 0.8]
        updates = generator.standard_normal((len(rows), 3)).astype(np.float32)
        facts = facts_of(updates, rows=rows, number=number, seed=seed)
        state = selector.observe(
            state, replace(outcome(number, selection), facts=facts, included=rows)
        )
        last |= dict(zip(rows.tolist(), updates.tolist(), strict=True))
        known[rows] = sizes[rows]
    assert len(last) > 2
