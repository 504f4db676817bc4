"""Runs the selector's `judge` on a round's updates, before they are weighted. Blocking."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from potluck.common.errors import RunError
from potluck.server.selection import (
    Floats,
    Judgement,
    MeasureMean,
    Rows,
    Selector,
    UpdateFacts,
)
from potluck.server.state import State


@dataclass(frozen=True, kw_only=True)
class UpdatesSeen:
    """A round's updates as the selector sees them.

    state: the selector's state. places: row of each client with an update, in client order.
    weights: weight of each client's update, if the selector set weights when it chose; else empty.
    """

    state: State
    places: Mapping[str, int]
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> Rows:
        """Rows of the clients with an update, in client order."""
        return np.array(list(self.places.values()), dtype=np.int64)

    def clients(self, rows: Collection[int]) -> list[str]:
        """Return the clients of these rows."""
        return [client for client, row in self.places.items() if row in rows]


LossOfMean = Callable[[Sequence[int], Floats], float]
"""Function that takes positions of updates and weights that sum to 1; returns the loss of the
weighted mean of these updates. Without positions, it returns the loss of the model before the
round."""


def judged(
    selector: Selector, name: str, state: State, facts: UpdateFacts, loss_of_mean: LossOfMean
) -> Judgement:
    """Return the selector's judgement on the updates. name: the selector's name, for errors.

    Raises RunError, naming the selector, if the judgement is not valid.
    """
    said: Any = selector.judge(state, facts)
    if isinstance(said, Generator):
        said = _led(said, name, facts, loss_of_mean)
    if not isinstance(said, Judgement):
        raise RunError(
            f"selector '{name}' returned a {type(said).__name__} from `judge`; it must return a "
            "Judgement",
            selector=name,
        )
    _check(said, facts, name)
    return said


def _led(
    generator: Generator[Any, Any, Any], name: str, facts: UpdateFacts, loss_of_mean: LossOfMean
) -> Any:
    """Run the selector's generator to its end, answering its requests; return its result."""
    loss: float | None = None
    try:
        while True:
            over, said = _advance(generator, loss)
            if over:
                return said
            if not isinstance(said, MeasureMean):
                raise RunError(
                    f"selector '{name}' yielded a {type(said).__name__} from `judge`; it must "
                    "yield MeasureMean",
                    selector=name,
                )
            loss = loss_of_mean(*_mean(said, facts, name))
    finally:
        generator.close()


def _advance(generator: Generator[Any, Any, Any], loss: float | None) -> tuple[bool, Any]:
    try:
        return False, generator.send(loss)
    except StopIteration as stop:
        return True, stop.value


def _mean(wanted: MeasureMean, facts: UpdateFacts, name: str) -> tuple[list[int], Floats]:
    """Return the positions of the updates in the requested mean, and their weights, which sum to
    1."""
    rows, places = np.asarray(wanted.rows), {row: i for i, row in enumerate(facts.rows.tolist())}
    known = rows.ndim == 1 and all(row in places for row in rows.tolist())
    if not known or len(set(rows.tolist())) != len(rows):
        raise RunError(
            f"selector '{name}' requests the mean of the rows {rows.tolist()}; each row must be "
            "of a client whose update has arrived, without repetition",
            selector=name,
        )
    chosen, weights = [places[row] for row in rows.tolist()], wanted.weights
    if weights is None:
        weights = facts.samples[chosen]
    sound = weights.shape == rows.shape and np.isfinite(weights).all() and (weights > 0).all()
    total = float(weights.sum()) if sound else math.inf
    if not math.isfinite(total):
        raise RunError(
            f"selector '{name}' requests a mean of {len(rows)} updates with the weights "
            f"{weights.tolist()}; all weights must be finite and above 0",
            selector=name,
        )
    return chosen, weights / total if chosen else weights


def _check(judgement: Judgement, facts: UpdateFacts, name: str) -> None:
    strangers = sorted(set(judgement.set_aside) - set(facts.rows.tolist()))
    if strangers:
        raise RunError(
            f"selector '{name}' excludes row {strangers[0]}, whose client has sent no update; "
            "exclude only clients that have sent one",
            selector=name,
        )
    if len(judgement.set_aside) == len(facts.rows):
        raise RunError(
            f"selector '{name}' excludes all {len(facts.rows)} updates of round {facts.round}; "
            "at least one update must remain",
            selector=name,
        )
