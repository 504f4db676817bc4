"""Pairs of clients that exchange masks and shares: all pairs, or neighbours on a random ring.

The ring is the order of SHA-256("graph" ‖ roster's digest ‖ client): each client computes its
neighbours from the roster that it verified; no party sends them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence


def neighbours(
    clients: Sequence[str], degree: int, roster_sha256: bytes
) -> Mapping[str, frozenset[str]]:
    """Return each client's neighbours, without itself.

    degree: even number of neighbours; 0, or the number of other clients, gives the complete graph.
    The ring is from Bell et al., CCS 2020, "Secure single-server aggregation with (poly)logarithmic
    overhead".
    """
    if degree == 0 or degree >= len(clients) - 1:
        everybody = frozenset(clients)
        return {client: everybody - {client} for client in clients}
    ring = sorted(clients, key=lambda client: _place(client, roster_sha256))
    reach = [distance for distance in range(-(degree // 2), degree // 2 + 1) if distance]
    return {
        client: frozenset(ring[(place + distance) % len(ring)] for distance in reach)
        for place, client in enumerate(ring)
    }


def _place(client: str, roster_sha256: bytes) -> bytes:
    return hashlib.sha256(b"graph" + roster_sha256 + client.encode()).digest()
