"""Completes a cohort, so that it is on enough hosts for a secure sum; groups a host's clients for
training together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from potluck.server.selection import Rows

# Enough hosts -------------------------------------------------------------------------------------

TagLimits = Sequence[tuple[Sequence[str], int]]
"""For each limited tag: its value for each row, and the maximum number of clients with one value,
as in `cohort_limits.narrowed`. All clients of a host have the same tags."""


def cover(
    begin: Iterable[int],
    candidates: Iterable[int],
    *,
    hosts: Sequence[str],
    least: int,
    limits: TagLimits,
) -> list[int] | None:
    """Add candidates on further hosts to `begin` until `least` hosts are covered; None if
    impossible.

    If at most one tag is limited, a cover is found whenever one exists, for any order of the
    candidates.

    begin: one row per host. hosts: host of each row of the run's clients; "" if unknown.
    """
    taken = list(begin)
    covered = {hosts[row] for row in taken}
    for row in candidates:
        if len(covered) >= least:
            break
        if hosts[row] and hosts[row] not in covered and _fits(row, taken, limits):
            taken.append(row)
            covered.add(hosts[row])
    return taken if len(covered) >= least else None


def on_enough_hosts(
    chosen: Rows,
    available: Rows,
    *,
    hosts: Sequence[str],
    least: int,
    count: int,
    limits: TagLimits,
    draw: np.random.Generator,
) -> Rows | None:
    """Return `chosen` if it is on `least` hosts, else a completed cohort; None if impossible.

    The first chosen client of each host stays. Clients on further hosts are drawn at random and
    come last. If the cohort already has `count` clients, the added clients replace others, the last
    chosen first.

    chosen: rows in the order chosen, within the limits. count: maximum number of clients, at least
    `least`.
    """
    rows: list[int] = chosen.tolist()
    first = {hosts[row]: row for row in reversed(rows) if hosts[row]}
    if len(first) >= least:
        return chosen
    drawn = draw.permutation(available).tolist()
    needed = cover(first.values(), drawn, hosts=hosts, least=least, limits=limits)
    # with limits on several tags, the chosen clients may prevent a cover: start without them
    if needed is None:
        needed = cover((), available.tolist(), hosts=hosts, least=least, limits=limits)
    if needed is None:
        return None
    cohort = list(needed)
    for row in rows:
        if row not in needed and len(cohort) < count and _fits(row, cohort, limits):
            cohort.append(row)
    kept = [row for row in rows if row in cohort]
    return np.array(kept + [row for row in needed if row not in kept], dtype=np.int64)


def _fits(row: int, cohort: Sequence[int], limits: TagLimits) -> bool:
    return all(
        sum(values[other] == values[row] for other in cohort) < most for values, most in limits
    )


# Companions ---------------------------------------------------------------------------------------

LARGEST_GROUP = 64
"""Maximum number of clients in a group. Each client's instruction names the whole group, so traffic
grows with the square of this number."""


def companions(
    members: Iterable[tuple[str, str, int | None]],
) -> Mapping[str, tuple[str, ...]]:
    """Return, for each client that has companions, its group, which includes itself.

    members: (client, host, number of passes), in the order that groups will have; a client whose
    host is "" has no companions. Clients of a host with the same number of passes form groups of at
    most `LARGEST_GROUP`.
    """
    of_host: dict[tuple[str, int | None], list[str]] = {}
    for client, host, passes in members:
        if host:
            of_host.setdefault((host, passes), []).append(client)
    groups = (
        tuple(clients[start : start + LARGEST_GROUP])
        for clients in of_host.values()
        for start in range(0, len(clients), LARGEST_GROUP)
    )
    return {client: group for group in groups if len(group) > 1 for client in group}
