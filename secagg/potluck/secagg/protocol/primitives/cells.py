"""Cells: groups of clients, drawn with public randomness (a coin) so that no party chooses them.

The members, the coin and the size determine the cells. All clients of a host are in the same cell.
Cells have at least `size` hosts. Choose `size` a little above the minimum number of hosts in a
released sum, so that a cell may lose some hosts.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

CELL_HOSTS: Final = 7
"""Number of hosts in a cell. A released sum needs five hosts, so two of them may drop out."""


def public_coin(federation: str, members: Iterable[str], epoch: str) -> bytes:
    """Return 32 bytes, computed from the federation, the ids of its members and an epoch's name.

    A party that chooses the epoch's name or enrols members can try many draws until one favours it.
    So use a name that no party chooses.
    """
    digest = hashlib.sha256(b"cells")
    for part in (federation, epoch, *sorted(set(members))):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def cells_of_members(
    hosts: Mapping[str, str], federation: str, *, data_epoch: int, least_hosts: int
) -> list[tuple[str, ...]]:
    """Return the cells of a federation's members whose data are of one epoch.

    hosts: the host of each member. Cells have `CELL_HOSTS` hosts if there are enough, and never
    fewer than `least_hosts`.
    """
    size = max(least_hosts, min(CELL_HOSTS, len(set(hosts.values()))))
    return draw_cells(hosts, public_coin(federation, hosts, f"data epoch {data_epoch}"), size=size)


def draw_cells(
    hosts: Mapping[str, str], coin: bytes, *, size: int = CELL_HOSTS
) -> list[tuple[str, ...]]:
    """Return the cells, each sorted by client.

    hosts: host by client. Every cell has between `size` and 2 · size − 1 hosts; there is no cell if
    there are fewer than `size` hosts.
    """
    clients_of: dict[str, list[str]] = defaultdict(list)
    for client, host in hosts.items():
        clients_of[host].append(client)
    ring = sorted(clients_of, key=lambda host: (_place(host, coin), host))
    count = len(ring) // size
    cells = []
    for index in range(count):
        begin, end = index * len(ring) // count, (index + 1) * len(ring) // count
        cells.append(tuple(sorted(c for host in ring[begin:end] for c in clients_of[host])))
    return cells


def _place(host: str, coin: bytes) -> bytes:
    return hashlib.sha256(coin + host.encode()).digest()
