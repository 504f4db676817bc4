"""Counts how often clients were selected, limits these numbers, and measures how uneven they
are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from potluck.server.machine.roster import RunRoster
from potluck.server.selection import Rows

# Imbalance ----------------------------------------------------------------------------------------
# A false but favourable profile makes a selector pick its client again and again. Signatures prove
# who sent a profile, not whether it is true. This measure does not depend on such claims.

Picks = NDArray[np.int64]
Expected = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class SelectionImbalance:
    """How unequally K clients were picked.

    gini: Gini coefficient of the numbers of picks: 0 if all clients have the same number, near 1 if
    a few clients have all picks. busiest: row of the client with most picks. times_fair: number of
    picks of that client over the mean number. unlikely: rows of clients with an improbable number
    of picks: under uniform selection, the probability that any client reaches this number is at
    most `chance` of `selection_imbalance`.
    """

    gini: float
    busiest: int
    times_fair: float
    unlikely: Rows


def selection_imbalance(
    picks: Picks, *, expected: Expected | None = None, chance: float = 1e-3
) -> SelectionImbalance | None:
    """Return how unequal the picks are; None before the first pick. picks: number of picks of each
    of K ≥ 1 rows.

    expected: average number of picks of each row under uniform selection among the clients that
    were available; by default the same for all.

    Under uniform selection, a client's number of picks has a mean m and at most the spread of a
    Poisson distribution, so P(picks ≥ x) ≤ exp(−m) (e·m/x)^x for x > m (Chernoff). A row is
    unlikely if K times that bound is at most `chance`. With uniform selection, the probability of
    an alarm about any client is then at most `chance`.
    """
    total = int(picks.sum())
    if total == 0:
        return None
    clients = len(picks)
    mean = total / clients
    ordered = np.sort(picks)
    ranks = np.arange(1, clients + 1)
    gini = float((2 * ranks - clients - 1) @ ordered) / (clients * total)
    fair = np.full(clients, mean) if expected is None else expected
    above, fair = np.maximum(picks, fair), np.maximum(fair, np.finfo(np.float64).tiny)
    log_bound = above - fair - above * np.log(np.maximum(above, fair) / fair)
    busiest = int(picks.argmax())
    return SelectionImbalance(
        gini=gini,
        busiest=busiest,
        times_fair=float(picks[busiest] / mean),
        unlikely=np.flatnonzero(log_bound + np.log(clients) <= np.log(chance)),
    )


# Counts -------------------------------------------------------------------------------------------


class PickRecord:
    """For each client of a run, the number of committed rounds whose cohort included it."""

    def __init__(self, roster: RunRoster) -> None:
        self._roster = roster
        self._counts = np.zeros(0, dtype=np.int64)

    @property
    def counts(self) -> Picks:
        """Number of picks by row."""
        joined = len(self._roster) - len(self._counts)
        if joined:
            self._counts = np.append(self._counts, np.zeros(joined, dtype=np.int64))
        return self._counts

    def add(self, cohort: Sequence[str]) -> None:
        """Count the cohort of a committed round."""
        self.counts[self._roster.rows(cohort)] += 1

    def restore(self, picks: Mapping[str, int]) -> None:
        """Load the numbers of picks that were stored before a restart."""
        for client, count in picks.items():
            self.counts[self._roster.row(client)] = count

    def summary(self) -> tuple[int, int]:
        """Return the largest number of picks of a client, and the number of clients never
        picked."""
        return int(self.counts.max(initial=0)), int((self.counts == 0).sum())


def cap_on_picks(maximum_share: float, round_number: int) -> int:
    """Return the maximum number of picks that a client may have after a round: ⌈share · round⌉."""
    return math.ceil(maximum_share * round_number - 1e-9)


def under_cap(
    available: Rows,
    picks: Picks,
    *,
    cap: int,
    count: int,
    hosts: Sequence[str] = (),
    least_hosts: int = 0,
) -> Rows:
    """Return the rows of `available`, sorted, whose clients have at most `cap` picks if picked
    again.

    picks: number of picks of each of the K rows. If fewer than `count` rows remain, the rows picked
    least are added, lower rows first. If the rows are on fewer than `least_hosts` of the `hosts`
    (host of each of the K rows), rows on other hosts are added.
    """
    kept = available[picks[available] < cap]
    missing = min(count, len(available)) - len(kept)
    if missing > 0:
        others = np.setdiff1d(available, kept)
        least = others[np.argsort(picks[others], kind="stable")][:missing]
        kept = np.concatenate([kept, least])
    if least_hosts:
        covered = {hosts[row] for row in kept}
        others = np.setdiff1d(available, kept)
        for row in others[np.argsort(picks[others], kind="stable")]:
            if len(covered) < least_hosts and hosts[row] not in covered:
                covered.add(hosts[row])
                kept = np.append(kept, row)
    return np.sort(kept)
