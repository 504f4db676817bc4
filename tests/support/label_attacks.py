"""Four attacks on DC selection with secure sums, from everything that the coordinator received.

`Received.by` reads the coordinator's own store. Each attack returns the label counts that it is
certain of, by client.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.sum_federation import SumFederation

from potluck.common.disclosure import SumKind
from potluck.common.learning.step_by_step import LABEL_DISTANCE
from potluck.server.store import Store
from potluck.server.store.records import AttemptKey

Counts = dict[str, list[int]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Told:
    """Distance that a client reported: between `target` and its own counts plus `active`."""

    client: str
    active: tuple[int, ...]
    target: tuple[int, ...]
    distance: float


@dataclass
class Received:
    """Data about labels that a coordinator received. sums: sets of clients and their exact sums, in
    order. told: distances that clients reported. profiles: disclosed counts by client. first: the
    sum requested first in each selection."""

    sums: list[tuple[frozenset[str], tuple[int, ...]]] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    profiles: Counts = field(default_factory=dict)
    first: list[tuple[frozenset[str], tuple[int, ...]]] = field(default_factory=list)

    @classmethod
    async def by(cls, federation: SumFederation) -> Received:
        """Return all label data of all runs in the coordinator's store."""
        found: Received = await federation.coordinator.store.call(_read)
        return found


def _read(store: Store) -> Received:
    found = Received()
    for each in store.sums():
        clients = each.record["clients"]
        assert isinstance(clients, dict)
        if each.total is not None:
            found.sums.append((frozenset(clients), tuple(each.total)))
    for profile in store.profiles():
        found.profiles[profile.client_id] = json.loads(profile.payload_json)["label_counts"]
    for run in store.runs():
        roster = store.roster(run.run_id)
        for number in range(1, run.rounds + 1):
            for attempt in range(1, store.last_attempt(run.run_id, number) + 1):
                _read_attempt(store, AttemptKey(run.run_id, number, attempt), roster, found)
    return found


def _read_attempt(store: Store, key: AttemptKey, roster: list[str], found: Received) -> None:
    fresh = True
    for exchange in store.answers(key):
        if exchange.answers is None:
            continue
        question: Any = exchange.question
        answers: Any = exchange.answers
        names = [roster[row] for row in answers["rows"]]
        if question["kind"] == SumKind.STEPWISE and answers["total"] is not None:
            if fresh:
                found.first.append((frozenset(names), tuple(answers["total"])))
            fresh = False
        elif question["kind"] == LABEL_DISTANCE:
            active, target = (
                tuple(int(word) for word in question["parameters"][name].split())
                for name in ("active", "target")
            )
            numbers = answers["values"][LABEL_DISTANCE]
            found.told += [
                Told(client, active, target, number)
                for client, number in zip(names, numbers, strict=True)
            ]


# The attacks ------------------------------------------------------------------------------------


def by_differencing(received: Received) -> Counts:
    """Attack 1: two sums that differ by one client give that client's counts."""
    found: Counts = {}
    for (before, less), (after, more) in pairwise(received.sums):
        added = after - before
        if before < after and len(added) == 1:
            [client] = added
            found[client] = [b - a for a, b in zip(less, more, strict=True)]
    return found


def by_intersection(sums: list[tuple[frozenset[str], tuple[int, ...]]]) -> Counts:
    """Attack 2: solve for clients that are alone in a combination of sums; exact arithmetic."""
    clients = sorted(frozenset().union(*(each for each, _ in sums)))
    rows = [
        [*(Fraction(client in each) for client in clients), *map(Fraction, total)]
        for each, total in sums
    ]
    rank = 0
    for column in range(len(clients)):
        pivot = next((row for row in range(rank, len(rows)) if rows[row][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        scale = rows[rank][column]
        rows[rank] = [value / scale for value in rows[rank]]
        for row in range(len(rows)):
            factor = rows[row][column]
            if row != rank and factor:
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[rank], strict=True)]
        rank += 1
    found: Counts = {}
    for values in rows[:rank]:
        members = [client for client, value in zip(clients, values, strict=False) if value]
        if len(members) == 1:
            found[members[0]] = [int(value) for value in values[len(clients) :]]
    return found


def by_distances(received: Received) -> Counts:
    """Attack 3: each distance d of a client with counts V is an equation,

        (1 − d)² |T|² |V + A|² = (T·V + T·A)²,

    linear in V, |V|², T·V and (T·V)² for one T. The solution is rounded, and accepted only if the
    integers reproduce all distances.
    """
    found: Counts = {}
    for client in sorted({each.client for each in received.told}):
        mine = [each for each in received.told if each.client == client]
        guess = _solve(mine)
        if guess is not None:
            found[client] = guess
    return found


def _solve(told: list[Told]) -> list[int] | None:
    classes = len(told[0].target)
    target = np.array(told[0].target, np.float64)
    if len({each.target for each in told}) != 1 or len({e.active for e in told}) < classes:
        return None
    active = np.array([each.active for each in told], np.float64)
    similar = 1.0 - np.array([each.distance for each in told])
    along = active @ target
    weight = similar**2 * (target @ target)
    matrix = np.column_stack(
        [2 * weight[:, None] * active, weight, -2 * along, -np.ones(len(told))]
    )
    right = along**2 - weight * np.einsum("ij,ij->i", active, active)
    scale = np.linalg.norm(matrix, axis=0)
    start = (np.linalg.lstsq(matrix / scale, right, rcond=None)[0] / scale)[:classes]
    counts = np.rint(_refined(start, active, target, similar)).astype(np.int64)
    if counts.min() < 0:
        return None
    exact = _similarities(counts.astype(np.float64), active, target)
    return counts.tolist() if np.allclose(exact, similar, rtol=0, atol=1e-12) else None


def _similarities(counts: Floats, active: Floats, target: Floats) -> Floats:
    together = active + counts
    norms = np.linalg.norm(together, axis=1) * np.linalg.norm(target)
    similar: Floats = together @ target / norms
    return similar


def _refined(start: Floats, active: Floats, target: Floats, similar: Floats) -> Floats:
    """Refine the linear solution by Gauss–Newton steps."""
    counts = start.clip(min=0.0)
    for _ in range(50):
        together = active + counts
        length = np.linalg.norm(together, axis=1)
        found = _similarities(counts, active, target)
        slope = target / (length[:, None] * np.linalg.norm(target))
        slope = slope - (found / length**2)[:, None] * together
        step, *_ = np.linalg.lstsq(slope, similar - found, rcond=None)
        counts = counts + step
        if np.abs(step).max() < 1e-9:
            break
    return counts
