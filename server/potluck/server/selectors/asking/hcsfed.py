"""HCSFed: selects from clusters of clients with similar updates.

Song, Zhang, Wang and Gui, "Fast Heterogeneous Federated Learning with Hybrid Client Selection"
(UAI 2023). Each client is asked once for a sketch of one local update.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from potluck.server.selection import (
    Answers,
    Ask,
    Floats,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.selectors.parts.choosing import Cohort, draw_weighted
from potluck.server.selectors.parts.k_means import k_means, nearest
from potluck.server.selectors.parts.reported import LARGEST
from potluck.server.state import State

_FACTOR = 100.0
"""Maximum plausible norm of a sketch, as a multiple of the median; longer sketches are scaled down
to this norm."""


@dataclass(frozen=True, kw_only=True)
class HcsFed(Selector):
    """Clusters clients by a local update; each cluster gets a share of the cohort.

    Clusters clients by k-means over sketches of one local update: once, or again as long as fewer
    different sketches than clusters are known. clusters: number of clusters. seats: `equal` gives
    each cluster the same number of seats, and the remaining seats to the clusters in turn; clients
    are drawn uniformly within a cluster. `neyman` gives a cluster seats in proportion to its size
    times its spread, the root mean squared distance of its sketches from their centre; clients are
    drawn in proportion to the norms of their sketches. sketch: method that compresses an update.
    numbers: length of a sketch.

    Seats that a small cluster can't fill go to the largest clusters. A client that joins later is
    asked for a sketch then, and joins the cluster with the nearest centre. A client that sent no
    sketch comes last, and is asked again. O(K).
    """

    clusters: Annotated[int, Field(ge=1, le=1000)] = 3
    seats: Literal["equal", "neyman"] = "equal"
    sketch: Literal["projection", "centroids"] = "projection"
    numbers: Annotated[int, Field(ge=1, le=64)] = 22

    asks_questions = frozenset({"sketch"})

    def init(self, population: Population) -> State:
        """Return a state in which no client has a cluster."""
        return _Map.empty(len(population), self.numbers).state()

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """Return the cohort, cluster by cluster."""
        generator = context.generator("hcsfed")
        cohort = Cohort(context, generator)
        if not cohort.size:
            return cohort.selection()
        known = _Map.of(state, len(context.population))
        unknown = context.available[known.cluster[context.available] < 0]
        if len(unknown):
            answers = yield Ask(
                rows=unknown,
                kind="sketch",
                parameters={
                    "method": self.sketch,
                    "numbers": self.numbers,
                    "seed": context.seed,
                },
                names=self._names,
                trains=True,
            )
            known = known.heard(answers, self._names, self.clusters)
        groups = [
            context.available[known.cluster[context.available] == cluster]
            for cluster in range(len(known.centres))
        ]
        for cluster, places in enumerate(self._seats(groups, known, cohort.size, context.round)):
            self._fill(cohort, groups[cluster], places, known, generator)
        cohort.draw(cohort.missing, "gave no sketch; drawn uniformly")
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Store the sketches that clients sent in this round."""
        rows = [outcome.selected, *(answers.rows for answers in outcome.answers)]
        known = _Map.of(state, 1 + max(int(each.max(initial=-1)) for each in rows))
        for answers in outcome.answers:
            known = known.heard(answers, self._names, self.clusters)
        return known.state()

    @property
    def _names(self) -> Sequence[str]:
        return tuple(f"sketch-{number}" for number in range(1, self.numbers + 1))

    def _seats(self, groups: Sequence[Rows], known: _Map, count: int, number: int) -> list[int]:
        sizes = np.array([len(group) for group in groups], dtype=np.int64)
        count = min(count, int(sizes.sum()))
        if self.seats == "equal":
            return equal_seats(sizes, count, number)
        spreads = np.array(
            [np.sqrt((known.away[group] ** 2).mean()) if len(group) else 0.0 for group in groups]
        )
        return neyman_seats(sizes, spreads, count)

    def _fill(
        self,
        cohort: Cohort,
        group: Rows,
        places: int,
        known: _Map,
        generator: np.random.Generator,
    ) -> None:
        if self.seats == "neyman":
            drawn = draw_weighted(known.length[group], places, generator)
            how = "drawn by the length of its update"
        else:
            drawn = generator.choice(len(group), size=places, replace=False)
            how = "drawn uniformly"
        rows = group[drawn]
        cohort.extend(
            rows.tolist(),
            [
                f"cluster {int(known.cluster[row]) + 1} of {len(known.centres)}, "
                f"{places} of {len(group)} clients: {how}"
                for row in rows
            ],
        )


def equal_seats(sizes: NDArray[np.int64], count: int, number: int) -> list[int]:
    """Return the seats of each cluster: the same number for all, and the remaining seats in turn.

    sizes: numbers of clients. count: number of seats, at most Σ sizes. number: number of the round,
    which determines the cluster that is first in turn.
    """
    if not len(sizes):
        return []
    each, rest = divmod(count, len(sizes))
    seats = np.full(len(sizes), each)
    seats[(number - 1 + np.arange(rest)) % len(sizes)] += 1
    return _within(seats, sizes, count)


def neyman_seats(sizes: NDArray[np.int64], spreads: Floats, count: int) -> list[int]:
    """Return each cluster's seats, in proportion to size · spread, by largest remainders. If all
    spreads are 0, seats are in proportion to size.

    count: number of seats, from 0 to Σ sizes. spreads: ≥ 0, finite.
    """
    if not count:
        return [0] * len(sizes)
    weights = sizes * (spreads / (spreads.max() or 1.0))
    if not weights.sum() > 0:
        weights = sizes.astype(np.float64)
    shares = count * weights / weights.sum()
    seats = np.floor(shares + 1e-9).astype(np.int64)
    order = np.argsort(seats - shares, kind="stable")
    seats[order[: count - int(seats.sum())]] += 1
    return _within(seats, sizes, count)


def _within(seats: NDArray[np.int64], sizes: NDArray[np.int64], count: int) -> list[int]:
    """Limit each cluster's seats to its size; give the excess to the largest clusters with room."""
    seats = np.minimum(seats, sizes)
    for cluster in np.argsort(-sizes, kind="stable"):
        more = min(count - int(seats.sum()), int(sizes[cluster] - seats[cluster]))
        seats[cluster] += more
    found: list[int] = seats.tolist()
    return found


@dataclass(frozen=True, kw_only=True)
class _Map:
    """The clusters of K clients, as stored in the selector's state.

    cluster: K, int64, number of each client's cluster; −1 if unknown. length: K, norm of the
    client's sketch. away: K, distance of the sketch from its cluster's centre. centres: H ×
    numbers; no rows before the first sketches.
    """

    cluster: NDArray[np.int64]
    length: Floats
    away: Floats
    centres: Floats

    @classmethod
    def empty(cls, clients: int, numbers: int) -> _Map:
        return cls(
            cluster=np.full(clients, -1, dtype=np.int64),
            length=np.zeros(clients),
            away=np.zeros(clients),
            centres=np.zeros((0, numbers)),
        )

    @classmethod
    def of(cls, state: State, clients: int) -> _Map:
        """Load a stored map and add rows for clients that have joined since the last round."""
        stored = cls(**{field.name: state.arrays[field.name] for field in fields(cls)})
        new = cls.empty(max(0, clients - len(stored.cluster)), stored.centres.shape[1])
        return replace(
            stored,
            cluster=np.concatenate([stored.cluster, new.cluster]),
            length=np.concatenate([stored.length, new.length]),
            away=np.concatenate([stored.away, new.away]),
        )

    def state(self) -> State:
        return State(arrays={field.name: getattr(self, field.name) for field in fields(self)})

    def heard(self, answers: Answers, names: Sequence[str], clusters: int) -> _Map:
        """Return the map, updated with these sketches. Sketches that are incomplete or not finite
        are ignored."""
        if not len(answers.rows) or not all(name in answers.values for name in names):
            return self
        points = np.stack([answers.values[name] for name in names], axis=1)
        sound = np.isfinite(points).all(axis=1)
        rows, points = answers.rows[sound], _shortened(points[sound])
        if not len(rows):
            return self
        cluster, length, away = self.cluster.copy(), self.length.copy(), self.away.copy()
        centres = self.centres
        if len(centres) < clusters:
            # So far there are fewer sketches than clusters, so each centre is a client's sketch.
            earlier = np.setdiff1d(np.flatnonzero(cluster >= 0), rows)
            points = np.concatenate([centres[cluster[earlier]], points])
            rows = np.concatenate([earlier, rows])
            centres = k_means(points, clusters)
        found = nearest(points, centres)
        cluster[rows] = found
        length[rows] = np.linalg.norm(points, axis=1)
        away[rows] = np.linalg.norm(points - centres[found], axis=1)
        return _Map(cluster=cluster, length=length, away=away, centres=centres)


def _shortened(points: Floats) -> Floats:
    """Return the sketches, scaled down to at most the maximum plausible norm."""
    points = np.clip(points, -LARGEST, LARGEST)
    lengths = np.linalg.norm(points, axis=1)
    if not (lengths > 0).any():
        return points
    limit = _FACTOR * float(np.median(lengths[lengths > 0]))
    shortened: Floats = points * np.minimum(1.0, limit / np.maximum(lengths, limit))[:, None]
    return shortened
