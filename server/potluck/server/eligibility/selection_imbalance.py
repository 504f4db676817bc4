"""A measure of how unevenly a run selects its clients.

A false but favourable profile makes a selector pick its client again and again. Signatures prove
who sent a profile, not whether it is true. This measure does not depend on such claims.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from potluck.server.selection import Rows

Picks = NDArray[np.int64]
Expected = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class SelectionImbalance:
    """How unequally K clients were picked.

    gini: Gini coefficient of the numbers of picks: 0 if all clients have the same number, near 1 if
    a few clients have all picks. busiest: row of the client with most picks. times_fair: number of
    picks of that client over the mean number. unlikely: rows of clients with an improbable number
    of picks: under uniform selection, the probability that any client reaches this number is at
    most the given one.
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
