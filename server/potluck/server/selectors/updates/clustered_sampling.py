"""Clustered sampling: each place of a cohort is drawn from its own distribution.

Fraboni et al., "Clustered Sampling: Low-Variance and Improved Representativity for Clients
Selection in Federated Learning", ICML 2021, Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from potluck.common.errors import ConfigurationError
from potluck.common.settings.extras import require
from potluck.server.selection import (
    Floats,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
    UpdateFact,
)
from potluck.server.selectors.parts.choosing import (
    Cohort,
    all_samples,
    draw_weighted,
    samples_or_mean,
    weighted,
)
from potluck.server.selectors.updates.update_memory import (
    LIMIT,
    angles,
    check_size,
    nothing,
    of_rows,
    remembered,
    ward,
)
from potluck.server.state import State

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Distribution from which one place of the cohort is drawn.

    positions: positions of clients. masses: probability of each of these clients; they sum to about
    1.
    """

    positions: Rows
    masses: Floats


@dataclass(kw_only=True)
class ClusteredSampling(Selector):
    """Groups clients of similar size or update, and draws one client per group.

    Each place of the cohort has its own distribution over some of the clients. A client's
    probabilities over all distributions sum to count · its share of the samples. So a client
    is chosen as often as by plain sampling, with less variance, unless its share exceeds 1 / count.

    by: `size` (Algorithm 1) fills the distributions with the clients from the largest to the
    smallest; `updates` (Algorithm 2) fills them with clusters of clients whose last updates have
    similar directions. unbiased: True if a client may be drawn more than once. It then trains once,
    its update is weighted by the number of its draws, and cohorts may have fewer than `count`
    clients. If False, a place whose client is already chosen is drawn again among the other
    clients. weights: weights of the updates without `unbiased`. `equal` follows the authors'
    program, because a client's samples already decide how often it is drawn; if all available
    clients are chosen, they are weighted by their samples. `samples` always weights by samples,
    which then count twice; it is for strategies and sums that accept no weights from a selector.

    Unknown numbers of samples are replaced by the mean. Algorithm 1: O(K log K); Algorithm 2:
    O(K²), for up to 3,000 clients.
    """

    by: Literal["size", "updates"] = "size"
    unbiased: bool = False
    weights: Literal["equal", "samples"] = "equal"

    def __post_init__(self) -> None:
        if self.unbiased and self.weights == "samples":
            raise ConfigurationError(
                'weights = "samples" and unbiased = true are not compatible: unbiased draws weight '
                'an update by its draws; set weights = "equal"'
            )
        if self.by == "updates":
            require("scipy", "potluck[server]")
        self.sets_weights = self.unbiased or self.weights == "equal"
        self.needs_facts = frozenset({UpdateFact.SKETCH} if self.by == "updates" else ())
        self.most_clients = LIMIT if self.by == "updates" else None

    def init(self, population: Population) -> State:
        """Return the initial state; for Algorithm 2, it has a sketch of each client's last
        update."""
        return State(arrays=nothing(len(population) if self.needs_facts else 0))

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return a cohort with one draw from each distribution."""
        if self.needs_facts:
            check_size("clustered-sampling", context)
        generator = context.generator("clustered-sampling")
        cohort = Cohort(context, generator)
        rows = generator.permutation(context.available)  # so that ties are in random order
        samples = samples_or_mean(context.population, rows)
        masses = cohort.size * samples / samples.sum() if cohort.size else samples
        if self.by == "size":
            places = by_size(masses, cohort.size)
        else:
            known, vectors = of_rows(state.arrays, rows)
            last = np.zeros((len(rows), vectors.shape[1]))
            last[known] = vectors
            places = by_similarity(angles(last), masses, cohort.size)
        if self.unbiased:
            return _with_repeats(rows, places, generator)
        fill(cohort, rows, samples, places, generator)
        chosen = cohort.selection()
        if self.weights == "samples":
            return chosen
        if len(chosen.rows) == len(rows):  # nothing is drawn
            return replace(chosen, weights=all_samples(context.population)[chosen.rows])
        return replace(chosen, weights=np.ones(len(chosen.rows)))

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Store the sketches of the round's updates."""
        if not self.needs_facts or outcome.facts is None:
            return state
        return State(arrays=remembered(state.arrays, outcome, outcome.facts.sketches))


def by_size(masses: Floats, places: int) -> list[Distribution]:
    """Return Algorithm 1's distributions: clients fill the places in order, the largest first.

    masses: each client's expected number of draws; they sum to `places`.
    """
    return _poured(np.argsort(-masses, kind="stable"), masses, places)


def by_similarity(distances: Floats, masses: Floats, places: int) -> list[Distribution]:
    """Return Algorithm 2's distributions: each of the largest clusters gets a place, and the other
    clusters fill these places up.

    distances: n × n, between all pairs of clients. masses: each client's expected number of draws.
    A cluster has at most the mass of one place. A client with a larger mass first gets whole places
    of its own.
    """
    own = np.floor(masses + _ROUNDING).astype(np.int64)
    alone = [
        Distribution(positions=np.array([position]), masses=np.ones(1))
        for position in np.repeat(np.arange(len(masses)), own).tolist()
    ][:places]
    left = np.maximum(masses - own, 0.0)
    clusters = sorted(_clusters(distances, left), key=lambda cluster: -float(left[cluster].sum()))
    opened = [list(cluster) for cluster in clusters[: places - len(alone)]]
    filled = [[float(left[position]) for position in cluster] for cluster in opened]
    rest = [position for cluster in clusters[len(opened) :] for position in cluster]
    place = 0
    for position in rest:
        mass = float(left[position])
        while mass > _ROUNDING and place < len(opened):
            part = min(mass, 1.0 - sum(filled[place]))
            if part > _ROUNDING:
                opened[place].append(position)
                filled[place].append(part)
                mass -= part
            if mass > _ROUNDING:
                place += 1
    return alone + [
        Distribution(positions=np.array(each), masses=np.array(parts))
        for each, parts in zip(opened, filled, strict=True)
    ]


def fill(
    cohort: Cohort,
    rows: Rows,
    samples: Floats,
    places: Sequence[Distribution],
    generator: np.random.Generator,
) -> None:
    """Draw each place among its clients that are not chosen yet.

    If a place has no such client, draw it among all clients not chosen yet, with probability ∝
    samples. rows, samples: row and number of samples of each client; the positions in `places`
    refer to these.
    """
    chosen = np.zeros(len(rows), dtype=bool)
    for number, place in enumerate(places, 1):
        free = np.where(chosen[place.positions], 0.0, place.masses)
        drawn = weighted(free, generator)
        if drawn is None:
            continue
        position = int(place.positions[drawn])
        chosen[position] = True
        share = place.masses[drawn] / place.masses.sum()
        cohort.add(int(rows[position]), _reason(number, share))
    if not cohort.missing:
        return
    left = np.flatnonzero(~chosen)
    more = left[draw_weighted(samples[left], cohort.missing, generator)]
    cohort.extend(rows[more].tolist(), ["in a place whose clients were chosen already"] * len(more))


def _with_repeats(
    rows: Rows, places: Sequence[Distribution], generator: np.random.Generator
) -> Selection:
    draws: dict[int, int] = {}
    reasons: list[str] = []
    for number, place in enumerate(places, 1):
        drawn = weighted(place.masses, generator)
        if drawn is None:
            continue
        row = int(rows[place.positions[drawn]])
        if row not in draws:
            reasons.append(_reason(number, place.masses[drawn] / place.masses.sum()))
        draws[row] = draws.get(row, 0) + 1
    return Selection(
        rows=np.array(list(draws), dtype=np.int64),
        reasons=reasons,
        weights=np.array(list(draws.values()), dtype=np.float64),
    )


def _reason(number: int, share: float) -> str:
    return f"drawn for place {number} with probability {share:.2f}"


def _poured(order: Rows, masses: Floats, places: int) -> list[Distribution]:
    """Return the clients' masses in this order, cut into places of mass 1 each."""
    ends = masses[order].cumsum()
    if len(ends):
        ends[-1] = max(ends[-1], places)
    begins = np.append(0.0, ends[:-1])
    found = []
    for place in range(places):
        first = int(np.searchsorted(ends, place + _ROUNDING))
        last = int(np.searchsorted(begins, place + 1 - _ROUNDING))
        parts = np.minimum(ends[first:last], place + 1) - np.maximum(begins[first:last], place)
        found.append(Distribution(positions=order[first:last], masses=parts.clip(min=0.0)))
    return found


def _clusters(distances: Floats, masses: Floats) -> list[list[int]]:
    """Return the largest branches of Ward's tree whose mass is at most 1."""
    members: dict[int, list[int]] = {
        position: [position] for position in range(len(masses)) if masses[position] > _ROUNDING
    }
    clients = sorted(members)
    if len(clients) < 2:
        return list(members.values())
    merges = ward(distances[np.ix_(clients, clients)])
    branches = {number: [position] for number, position in enumerate(clients)}
    for number, (one, other) in enumerate(merges[:, :2].astype(np.int64).tolist(), len(clients)):
        if one in branches and other in branches:
            joined = branches[one] + branches[other]
            if masses[joined].sum() <= 1 + _ROUNDING:
                branches[number] = joined
                del branches[one], branches[other]
    return list(branches.values())
