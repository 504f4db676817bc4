"""A selector that makes the summed labels of a cohort as even as possible (FedEntOpt)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from pydantic import NonNegativeInt

from potluck.common.errors import StorageError
from potluck.server.selection import (
    Floats,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
    Signal,
)
from potluck.server.selectors.parts.choosing import Cohort, largest, profiles, with_labels
from potluck.server.selectors.parts.label_entropy import Entropies, bits
from potluck.server.selectors.parts.parallel import passes
from potluck.server.state import State


@dataclass(frozen=True, kw_only=True)
class FedEntOpt(Selector):
    """Draws a client, then adds those that make the cohort's labels most even.

    Labels with a higher entropy are more even. buffer: number of last selected clients that pause;
    by default, half of the initial clients. If no other client is available, the clients that have
    paused longest can be chosen again. A client that was selected and failed pauses like the
    others. Clients without a profile can only be drawn first, or fill a cohort if no others are
    left. O(count · K · classes).
    """

    buffer: NonNegativeInt | None = None

    needs_profiles = frozenset({Signal.LABEL_COUNTS})

    def init(self, population: Population) -> State:
        """Return the initial state. buffer: rows of the pausing clients, oldest first. capacity:
        their maximum number."""
        capacity = len(population) // 2 if self.buffer is None else self.buffer
        return _state(Buffer((), capacity))

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return the cohort, chosen greedily by entropy. Each chosen client enters the buffer at
        once."""
        generator = context.generator("fedentopt")
        cohort = Cohort(context, generator)
        buffer = _buffer(state)
        if cohort.missing:
            resting = np.isin(context.available, state.arrays["buffer"])
            if resting.all():
                released = buffer.release(context.available)
                cohort.draw(1, "paused longest", np.array([released], dtype=np.int64))
            else:
                cohort.draw(1, "drawn uniformly", context.available[~resting])
            self._add_greedily(cohort, buffer, context, generator)
        why = "no label counts; drawn uniformly"
        cohort.draw(cohort.missing, why, np.setdiff1d(context.available, buffer.array()))
        cohort.draw(cohort.missing, why)
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Add all selected clients to the buffer, in the order chosen."""
        buffer = _buffer(state)
        for row in outcome.cohort.tolist():
            buffer.enter(row)
        return _state(buffer)

    def _add_greedily(
        self,
        cohort: Cohort,
        buffer: Buffer,
        context: SelectionContext,
        generator: np.random.Generator,
    ) -> None:
        table = context.population.label_counts
        rows = _reachable(with_labels(table, context.available), buffer, cohort.missing)
        if table is None or not len(rows):
            return
        counts = profiles(table, rows).clip(min=0.0)
        pool = _Pool(rows, counts, buffer)
        pool.choose(cohort.rows[0])
        entropies = Entropies(counts)
        before = float(bits(pool.sums))
        with passes(len(rows)) as run:
            while cohort.missing and pool.is_open():
                scores = entropies.with_each(pool.sums, run)
                scores += pool.closed
                place = largest(scores, generator)
                row, after = int(rows[place]), float(scores[place])
                cohort.add(row, f"entropy {after - before:+.2f} bit")
                pool.choose(row)
                before = after


class Buffer:
    """First-in-first-out buffer of the clients selected last, oldest first."""

    def __init__(self, rows: Iterable[int], capacity: int) -> None:
        self.rows = dict.fromkeys(rows)
        self.capacity = capacity

    def array(self) -> Rows:
        """The rows as an array."""
        return np.fromiter(self.rows, dtype=np.int64, count=len(self.rows))

    def enter(self, row: int) -> list[int]:
        """Add a row as the newest; return the rows that leave the buffer."""
        self.rows.pop(row, None)
        self.rows[row] = None
        fallen = []
        while len(self.rows) > self.capacity:
            oldest = next(iter(self.rows))
            del self.rows[oldest]
            fallen.append(oldest)
        return fallen

    def release(self, among: Rows) -> int | None:
        """Remove and return the oldest row of the buffer that is in `among` (sorted); None if there
        is none."""
        row = next((row for row in self.rows if _place(among, row) is not None), None)
        if row is not None:
            del self.rows[row]
        return row


class _Pool:
    """The clients with label counts: tracks which can be chosen next, and the summed counts of the
    chosen ones.

    closed: number added to each client's score: 0 if the client can be chosen, else −∞.
    """

    def __init__(self, rows: Rows, counts: Floats, buffer: Buffer) -> None:
        self._rows = rows
        self._counts = counts
        self._buffer = buffer
        self._chosen: set[int] = set()
        self._places = dict(zip(rows.tolist(), range(len(rows)), strict=True))
        self.sums = np.zeros(counts.shape[1])
        resting = np.isin(rows, buffer.array())
        self.closed = np.where(resting, -np.inf, 0.0)
        self._open = len(rows) - int(np.count_nonzero(resting))

    def choose(self, row: int) -> None:
        """Add a client to the chosen ones and to the buffer. Rows that leave the buffer can be
        chosen again."""
        self._chosen.add(row)
        place = self._places.get(row)
        if place is not None:
            self.sums += self._counts[place]
            self._close(place)
        for fallen in self._buffer.enter(row):
            if fallen not in self._chosen:
                self._reopen(fallen)

    def is_open(self) -> bool:
        """Return True if a client can be chosen. If no client can, first release the oldest client
        of the buffer."""
        if self._open:
            return True
        waiting = self._rows[~np.isin(self._rows, np.fromiter(self._chosen, dtype=np.int64))]
        released = self._buffer.release(waiting)
        if released is None:
            return False
        self._reopen(released)
        return True

    def _close(self, place: int) -> None:
        self._open -= self.closed[place] == 0
        self.closed[place] = -np.inf

    def _reopen(self, row: int) -> None:
        place = self._places.get(row)
        if place is not None:
            self._open += self.closed[place] != 0
            self.closed[place] = 0.0


def _reachable(rows: Rows, buffer: Buffer, picks: int) -> Rows:
    """Return those of `rows` (sorted) that can become selectable within the next `picks` picks.

    Each pick releases at most one row of the buffer, the oldest first. So the newer rows of the
    buffer need no scores.
    """
    resting = buffer.array()
    out_of_reach = resting[np.isin(resting, rows)][picks:]
    reachable: Rows = rows[~np.isin(rows, out_of_reach)]
    return reachable


def _place(rows: Rows, row: int) -> int | None:
    """Return the position of `row` in sorted `rows`; None if it is not there."""
    place = int(np.searchsorted(rows, row))
    return place if place < len(rows) and rows[place] == row else None


def _buffer(state: State) -> Buffer:
    capacity = state.scalars["capacity"]
    if not isinstance(capacity, int):
        raise StorageError(
            f"the stored buffer of selector fedentopt has the capacity {capacity!r}, which is not "
            "a whole number; start a new run"
        )
    return Buffer(state.arrays["buffer"].tolist(), capacity)


def _state(buffer: Buffer) -> State:
    return State(scalars={"capacity": buffer.capacity}, arrays={"buffer": buffer.array()})
