"""Which clients of a run attend, from which host, and who may still come back. No clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set


class Presence:
    """The clients that attend. grace: seconds for which a client that went away may come back."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self._attending: set[str] = set()
        self._back_by: dict[str, float] = {}  # of those away that may come back
        self._host_of: dict[str, str] = {}

    @property
    def attending(self) -> Set[str]:
        """Clients whose host is connected."""
        return self._attending

    def attends(self, client: str) -> bool:
        """Return whether a client's host is connected."""
        return client in self._attending

    def back_by(self, client: str) -> float:
        """Until when a client that is away may come back; long ago where it is not waited for."""
        if client in self._attending:
            return -math.inf
        return self._back_by.get(client, -math.inf)

    def returning(self, now: float) -> Mapping[str, float]:
        """Clients that are away and may still come back, and until when."""
        return {client: by for client, by in self._back_by.items() if now < by}

    def host_of(self, client: str) -> str:
        """The host that answers for a client, or did last; empty where none ever has."""
        return self._host_of.get(client, "")

    def hosts(self, clients: Iterable[str]) -> frozenset[str]:
        """The hosts of these clients, as far as known."""
        return frozenset(filter(None, map(self.host_of, clients)))

    def join(self, clients: Iterable[str], hosts: Mapping[str, str]) -> None:
        """Clients attend, from these hosts."""
        for client in clients:
            self._attending.add(client)
            self._back_by.pop(client, None)
        self._host_of.update(hosts)

    def leave(self, clients: Iterable[str], now: float) -> None:
        """Clients' host went away."""
        for client in clients:
            self._attending.discard(client)
            self._back_by[client] = now + self.grace

    def expect(self, clients: Iterable[str], until: float) -> None:
        """The clients that do not attend may come until then."""
        for client in clients:
            if client not in self._attending:
                self._back_by[client] = until
