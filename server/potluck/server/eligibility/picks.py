"""Counts how often clients were selected, limits these numbers, and finds improbable ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.server.machine.roster import RunRoster
from potluck.server.selection import Rows

# Improbable picks ---------------------------------------------------------------------------------
# A false but favourable profile makes a selector pick its client again and again. Signatures prove
# who sent a profile, not whether it is true. This measure does not depend on such claims.

Picks = NDArray[np.int64]
Expected = NDArray[np.float64]

_CHANCE = 1e-3
"""Maximum probability of a false alarm about any client."""


def improbable_picks(picks: Picks, expected: Expected) -> Rows:
    """Return the rows of clients that were picked improbably often.

    picks: number of picks of each of K ≥ 1 rows. expected: average number of picks of each row
    under uniform selection among the clients that were available.

    Under uniform selection, a client's number of picks has a mean m and at most the spread of a
    Poisson distribution, so P(picks ≥ x) ≤ exp(−m) (e·m/x)^x for x > m (Chernoff). A row is
    returned if K times that bound is at most 0.001.
    """
    fair = np.maximum(expected, np.finfo(np.float64).tiny)
    above = np.maximum(picks, fair)
    log_bound = above - fair - above * (np.log(above) - np.log(fair))
    return np.flatnonzero(log_bound + math.log(len(picks)) <= math.log(_CHANCE))


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
