"""The roster of a run: its clients, their rows, and their disclosed numbers of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.server.selection import Rows


class RunRoster:
    """A run's clients in the order of their admission; a client's position is its permanent row.

    The state machine admits clients; all other code that uses row numbers reads them here.
    """

    def __init__(self, clients: Iterable[str] = ()) -> None:
        self.ids: list[str] = []
        self._row_of: dict[str, int] = {}
        self._samples: dict[str, int] = {}
        self.append(clients)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __contains__(self, client: str) -> bool:
        return client in self._row_of

    def append(self, clients: Iterable[str]) -> None:
        """Add clients to the roster, in this order."""
        for client in clients:
            self._row_of[client] = len(self.ids)
            self.ids.append(client)

    def row(self, client: str) -> int:
        """Return the row of a client. Raises KeyError if it is not in the roster."""
        return self._row_of[client]

    def rows(self, clients: Sequence[str]) -> Rows:
        """Return the rows of these clients, in the given order."""
        return np.array([self._row_of[client] for client in clients], dtype=np.int64)

    def clients(self, rows: Rows) -> tuple[str, ...]:
        """Return the clients in these rows, in the given order."""
        return tuple(self.ids[row] for row in np.asarray(rows).tolist())

    def note_samples(self, disclosed: Mapping[str, int]) -> None:
        """Store the numbers of training samples that clients disclosed; they replace earlier
        numbers."""
        self._samples |= disclosed

    def samples(self) -> NDArray[np.int64]:
        """The disclosed numbers of samples by row; 0 if unknown."""
        return np.array([self._samples.get(client, 0) for client in self.ids], dtype=np.int64)
