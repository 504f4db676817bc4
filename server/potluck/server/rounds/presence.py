"""Tracks the connected clients of a run, their hosts, and clients that may reconnect. No clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set


class Presence:
    """The connected clients. grace: seconds for which a disconnected client may still reconnect."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self._attending: set[str] = set()
        self._back_by: dict[str, float] = {}  # disconnected client → latest time to reconnect
        self._host_of: dict[str, str] = {}

    @property
    def attending(self) -> Set[str]:
        """Clients whose host is connected."""
        return self._attending

    def attends(self, client: str) -> bool:
        """Return whether a client's host is connected."""
        return client in self._attending

    def back_by(self, client: str) -> float:
        """Return the time until which a disconnected client may reconnect; long ago if it may
        not."""
        if client in self._attending:
            return -math.inf
        return self._back_by.get(client, -math.inf)

    def returning(self, now: float) -> Mapping[str, float]:
        """Return the disconnected clients that may still reconnect, each with its time limit."""
        return {client: by for client, by in self._back_by.items() if now < by}

    def host_of(self, client: str) -> str:
        """Return the host that has or last had this client; empty if no host ever had it."""
        return self._host_of.get(client, "")

    def hosts(self, clients: Iterable[str]) -> frozenset[str]:
        """Return the known hosts of these clients."""
        return frozenset(filter(None, map(self.host_of, clients)))

    def join(self, clients: Iterable[str], hosts: Mapping[str, str]) -> None:
        """Record that clients have connected, from these hosts."""
        for client in clients:
            self._attending.add(client)
            self._back_by.pop(client, None)
        self._host_of.update(hosts)

    def leave(self, clients: Iterable[str], now: float) -> None:
        """Record that the clients' host has disconnected."""
        for client in clients:
            self._attending.discard(client)
            self._back_by[client] = now + self.grace

    def expect(self, clients: Iterable[str], until: float) -> None:
        """Allow those of these clients that are disconnected to reconnect until this time."""
        for client in clients:
            if client not in self._attending:
                self._back_by[client] = until
