"""Groups of clients in a cohort that the same host may train together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LARGEST_GROUP = 64
"""Maximum size of a group. Each client's instruction names the whole group, so traffic grows with
the square of the size."""


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
