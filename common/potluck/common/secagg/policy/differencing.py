"""The check that exact sums over sets of clients, taken together, single out no small group.

Sums over sets are linear equations in the clients' inputs. A set is refused if it, the difference
from an earlier one, or any combination of all of them concerns too small a group. Decisions depend
on sets alone, never on sums, so that a refusal says nothing about anybody's input.

Groups are counted in hosts: whoever breaks a host knows all its clients. The least support of a
combination can't be found in general (it is the minimum distance of a code); what is checked is
every combination that is supported on two hosts, and the number of independent equations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.secagg.rules import Rule, require

_PRIMES: Final = (2_147_483_647, 2_147_483_629)
"""Ranks are computed modulo both; a determinant would have to be a multiple of one to mislead."""

_Matrix = NDArray[np.int64]


def check_set(
    candidate: Collection[str],
    earlier: Iterable[Collection[str]],
    hosts: Mapping[str, str],
    least_hosts: int,
) -> None:
    """Raise BrokenRuleError (differencing) unless the sum over `candidate` may be released too.

    hosts: of each client in any of the sets. Requires
    (1) at least `least_hosts` hosts in the set;
    (2) in the difference from each earlier set, none or at least as many;
    (3) so many fewer independent sums than clients seen, unless there is but one sum;
    (4) no combination of all sums that is about the clients of two hosts only.
    """
    new = frozenset(candidate)
    before = {frozenset(each) for each in earlier}
    distinct = _distinct_hosts(new, hosts)
    require(
        distinct >= least_hosts,
        Rule.DIFFERENCING,
        f"the set has {distinct} hosts, {least_hosts} are required",
    )
    if new in before:
        return
    for other in before:
        apart = _distinct_hosts(new ^ other, hosts)
        require(
            apart >= least_hosts,
            Rule.DIFFERENCING,
            f"the set differs from an earlier one by {apart} hosts, {least_hosts} are required",
        )
    _check_span([*before, new], hosts, least_hosts)


def _distinct_hosts(clients: Iterable[str], hosts: Mapping[str, str]) -> int:
    return len({hosts[client] for client in clients})


def _check_span(sets: Sequence[frozenset[str]], hosts: Mapping[str, str], least: int) -> None:
    clients = sorted(frozenset().union(*sets))
    places: dict[str, list[int]] = defaultdict(list)
    for column, client in enumerate(clients):
        places[hosts[client]].append(column)
    matrix = np.array([[client in each for client in clients] for each in sets], np.int64)
    for prime in _PRIMES:
        reduced, pivots = _row_reduce(matrix, prime)
        rank = len(pivots)
        require(
            rank <= max(1, len(clients) - least),
            Rule.DIFFERENCING,
            f"{rank} independent sums over {len(clients)} clients would leave too little unknown",
        )
        require(
            not _isolates_two_hosts(reduced, pivots, list(places.values()), prime),
            Rule.DIFFERENCING,
            "sums could be combined to one over the clients of one or two hosts",
        )


def _isolates_two_hosts(
    reduced: _Matrix, pivots: Sequence[int], groups: Sequence[Sequence[int]], prime: int
) -> bool:
    """Return whether the row space has a vector other than 0 on the columns of two groups only.

    Such a vector combines rows whose pivots are in these columns, and the combination vanishes on
    all columns outside: there these rows depend on one another.
    """
    row_of = {pivot: row for row, pivot in enumerate(pivots)}
    rows_of = [[row_of[column] for column in group if column in row_of] for group in groups]
    free = np.setdiff1d(np.arange(reduced.shape[1]), pivots)
    filled = (reduced[:, free] != 0).astype(np.int64)
    weights = filled.sum(axis=1)
    apart = (weights[:, None] + weights - 2 * filled @ filled.T).tolist()
    light = weights.tolist()
    for one, other in combinations(range(len(groups)), 2):
        rows = [*rows_of[one], *rows_of[other]]
        inside = len(groups[one]) + len(groups[other]) - len(rows)
        # Rows depend on one another outside just if their entries differ in place inside at most.
        heavy = all(light[row] > inside for row in rows)
        if heavy and (len(rows) < 2 or (len(rows) == 2 and apart[rows[0]][rows[1]] > inside)):
            continue
        columns = np.array([*groups[one], *groups[other]])
        if rows and _depends(reduced[rows][:, free[~np.isin(free, columns)]], prime):
            return True
    return False


def _depends(rows: _Matrix, prime: int) -> bool:
    """Return whether the rows depend on one another, with shortcuts for the two usual cases."""
    filled = rows.any(axis=1)
    if not filled.all():
        return True
    if len(rows) == 1:
        return False
    if len(rows) == 2:
        first, second = rows
        if not np.array_equal(first != 0, second != 0):
            return False
        place = int(np.argmax(first != 0))
        return bool(((first * int(second[place]) - second * int(first[place])) % prime == 0).all())
    return len(_row_reduce(rows, prime)[1]) < len(rows)


def _row_reduce(matrix: _Matrix, prime: int) -> tuple[_Matrix, list[int]]:
    """The reduced row echelon form modulo a prime below 2^31.5, without zero rows; its pivots."""
    work = matrix % prime
    pivots: list[int] = []
    for column in range(work.shape[1]):
        row = len(pivots)
        if row == work.shape[0]:
            break
        candidates = np.flatnonzero(work[row:, column])
        if not candidates.size:
            continue
        chosen = row + int(candidates[0])
        work[[row, chosen]] = work[[chosen, row]]
        work[row] = work[row] * pow(int(work[row, column]), -1, prime) % prime
        factors = work[:, column].copy()
        factors[row] = 0
        changed = np.flatnonzero(factors)
        product = factors[changed, None] * work[row] % prime
        work[changed] = (work[changed] - product) % prime
        pivots.append(column)
    return work[: len(pivots)], pivots
