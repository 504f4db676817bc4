"""Clients that keep sending updates without usable numbers are put into quarantine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from potluck.common.errors import NotFiniteError, OutOfBoundsError

OFFENCES: Final = frozenset({NotFiniteError.reason, OutOfBoundsError.reason})
"""Reasons for refusing an update that an honest client seldom gives."""

MOST_OFFENCES: Final = 3
"""So many refused updates, and a client is put into quarantine."""


class Offences:
    """Counts them over all runs of a coordinator process. Lives on the event loop."""

    def __init__(self, quarantine: Callable[[str, str], Awaitable[None]]) -> None:
        """`quarantine` is called with a client and the reason."""
        self._quarantine = quarantine
        self._counts: Counter[str] = Counter()

    async def add(self, clients: Iterable[str]) -> dict[str, str]:
        """Updates of these clients were refused in an attempt to which others' came. Who is put
        into quarantine, and why.

        As others' updates were good, it was not the run that can't be trained.
        """
        self._counts.update(clients)
        excluded = {
            client: f"{count} of its updates held NaN, infinity or numbers beyond all bounds"
            for client, count in self._counts.items()
            if count >= MOST_OFFENCES
        }
        for client in excluded:
            del self._counts[client]  # readmitted, it begins anew
        for client, reason in excluded.items():
            await self._quarantine(client, reason)
        return excluded
