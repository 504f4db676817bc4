"""Puts clients that keep sending updates without usable numbers into quarantine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from potluck.common.errors import NotFiniteError, OutOfBoundsError

OFFENCES: Final = frozenset({NotFiniteError.reason, OutOfBoundsError.reason})
"""Refusal reasons of updates that an honest client seldom causes."""

MOST_OFFENCES: Final = 3
"""Number of refused updates after which a client is put into quarantine."""


class Offences:
    """Counts refused updates over all runs of a coordinator process. Used on the event loop."""

    def __init__(self, quarantine: Callable[[str, str], Awaitable[None]]) -> None:
        """quarantine: function called with a client and the reason."""
        self._quarantine = quarantine
        self._counts: Counter[str] = Counter()

    async def add(self, clients: Iterable[str]) -> dict[str, str]:
        """Count refused updates. Return the clients that were put into quarantine, with the
        reasons.

        Call it only for an attempt in which updates of other clients were accepted: then the run
        itself can be trained, and the refused updates are the clients' fault.
        """
        self._counts.update(clients)
        excluded = {
            client: (
                f"{count} of the client's updates contained NaN, infinity or numbers that are "
                "too large"
            )
            for client, count in self._counts.items()
            if count >= MOST_OFFENCES
        }
        for client in excluded:
            del self._counts[client]  # if the client is readmitted, its count starts at 0
        for client, reason in excluded.items():
            await self._quarantine(client, reason)
        return excluded
