"""Numbers of shares and consents that a session needs, given the number of hosts that may collude.

Colluders are counted in hosts, because an attacker that controls a host controls all of its
clients. A number of hosts is assumed to collude with the coordinator: in the worst case, the hosts
with the most clients.

Complete graph: with n clients, of which a may collude, threshold and quorum are ⌊(n + a) / 2⌋ + 1.
So any two certificates, or a certificate and a rebuilt secret, need an honest client in common, and
this client answers for one set only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb
from typing import Final

COMPLETE_LIMIT: Final = 128
"""Maximum number of clients for which the complete graph is the default."""

SECURITY_BITS: Final = 80
"""Exponent: security fails with probability 2^-80 at most.

40 of these bits are a reserve against a coordinator that tries many rosters to get a favourable
graph.
"""

CORRECTNESS_BITS: Final = 20
"""Exponent: random losses of clients end a session with probability 2^-20 at most."""


@dataclass(frozen=True)
class Thresholds:
    """Numbers that a session needs. degree: number of a client's neighbours, 0 for all other
    clients; threshold: shares that rebuild a secret; quorum: consents that certify a set.
    """

    degree: int
    threshold: int
    quorum: int


def assumed_colluding_hosts(hosts: int) -> int:
    """Return ⌊(h − 1) / 3⌋, the number of hosts assumed to collude by default."""
    return max(0, (hosts - 1) // 3)


def colluding_clients(hosts: Iterable[str], colluding_hosts: int) -> int:
    """Return the maximum number of clients on `colluding_hosts` hosts. hosts: the host of each
    client, one entry per client."""
    held = sorted(Counter(hosts).values(), reverse=True)
    return sum(held[:colluding_hosts])


def majority(clients: int, colluding: int) -> int:
    """Return the least n such that any two groups of n clients have an honest client in common."""
    return (clients + colluding) // 2 + 1


def complete_thresholds(hosts: Iterable[str], colluding_hosts: int | None = None) -> Thresholds:
    """Return the thresholds for the complete graph.

    hosts: the host of each client. colluding_hosts: ⌊(h − 1) / 3⌋ if None.
    """
    listed = list(hosts)
    if colluding_hosts is None:
        colluding_hosts = assumed_colluding_hosts(len(set(listed)))
    enough = majority(len(listed), colluding_clients(listed, colluding_hosts))
    return Thresholds(degree=0, threshold=enough, quorum=enough)


@lru_cache(maxsize=256)
def circulant_thresholds(clients: int, colluding: int, dropping: int) -> Thresholds | None:
    """Return the least even degree, and its threshold, that are safe with dropouts; experimental.

    colluding, dropping: maximum number of clients that collude, or drop out. None if only the
    complete graph is.
    """
    for degree in range(2, clients - 1, 2):
        threshold = _least_safe_threshold(clients, colluding, degree)
        if threshold is not None and _is_live(clients, dropping, degree, threshold):
            return Thresholds(degree, threshold, majority(clients, colluding))
    return None


@lru_cache(maxsize=256)
def circulant_is_safe(clients: int, colluding: int, degree: int, threshold: int) -> bool:
    """Return True if secrets can be rebuilt against the rules with probability 2^-80 at most.

    1. No client has enough colluding neighbours that they, with half of the others, could rebuild
       both its secrets: n · Pr[Hyp(n−1, a, k) ≥ m + 1] ≤ 2^-81 with t > m and 2t > k + 1 + m.
    2. A coordinator that has seen the graph, and then chooses which clients to call lost, can't
       cut an arc out of the ring: C(n, 2) · Pr[Hyp(n−1, a, k/2) ≥ t − k/2 − 1]² ≤ 2^-81.

    The second bound has not been reviewed by others.
    """
    least = _least_safe_threshold(clients, colluding, degree)
    # Compare with the least safe threshold: if both conditions hold for it, they hold for any
    # higher one.
    return least is not None and least <= threshold <= degree + 1


def _least_safe_threshold(clients: int, colluding: int, degree: int) -> int | None:
    bound = Fraction(1, 2 ** (SECURITY_BITS + 1))
    neighbours = _tails(clients - 1, colluding, degree)
    most = next(m for m in range(degree + 1) if clients * neighbours[m + 1] <= bound)
    threshold = max(most, (degree + 1 + most) // 2) + 1
    half = degree // 2
    window = _tails(clients - 1, colluding, half)
    while threshold <= degree + 1:
        needed = threshold - half - 1
        chance = window[min(max(needed, 0), half + 1)]
        if comb(clients, 2) * chance * chance <= bound:
            return threshold
        threshold += 1
    return None


def _is_live(clients: int, dropping: int, degree: int, threshold: int) -> bool:
    """Return True if n · Pr[surviving neighbours < t] ≤ 2^-20 for `dropping` random losses."""
    lost = _tails(clients - 1, dropping, degree)
    fatal = degree - threshold + 1
    if fatal < 0:
        return False
    return clients * lost[min(fatal, degree + 1)] <= Fraction(1, 2**CORRECTNESS_BITS)


@lru_cache(maxsize=1024)
def _tails(population: int, marked: int, drawn: int) -> tuple[Fraction, ...]:
    """Return Pr[X ≥ x] for x = 0 … drawn + 1.

    X (hypergeometric) is the number of marked elements among `drawn` ones from `population`.
    """
    total = comb(population, drawn)
    ways = [comb(marked, x) * comb(population - marked, drawn - x) for x in range(drawn + 1)]
    tails = [Fraction(0)]
    running = 0
    for way in reversed(ways):
        running += way
        tails.append(Fraction(running, total))
    return tuple(reversed(tails))
