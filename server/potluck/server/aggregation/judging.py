"""The selector's judgement of a round's updates, before they are weighed. Blocking."""

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

    state: the selector's. places: the row of each update's client, in client order. weights: by
    client, the weight of its update, if the selector set weights when it chose.
    """

    state: State
    places: Mapping[str, int]
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> Rows:
        """The rows of the updates' clients, in client order."""
        return np.array(list(self.places.values()), dtype=np.int64)

    def clients(self, rows: Collection[int]) -> list[str]:
        """The clients of these rows."""
        return [client for client, row in self.places.items() if row in rows]


LossOfMean = Callable[[Sequence[int], Floats], float]
"""The loss of the mean of the updates at these places, with weights that sum to 1; of none, that of
the model as it was."""


def judged(
    selector: Selector, name: str, state: State, facts: UpdateFacts, loss_of_mean: LossOfMean
) -> Judgement:
    """Return the judgement of the selector called `name` on the updates.

    Raises RunError, naming the selector, if its judgement is not valid.
    """
    said: Any = selector.judge(state, facts)
    if isinstance(said, Generator):
        said = _led(said, name, facts, loss_of_mean)
    if not isinstance(said, Judgement):
        raise RunError(
            f"selector '{name}' judged updates with a {type(said).__name__}, not with a Judgement",
            selector=name,
        )
    _check(said, facts, name)
    return said


def _led(
    generator: Generator[Any, Any, Any], name: str, facts: UpdateFacts, loss_of_mean: LossOfMean
) -> Any:
    """Lead the generator to what it returns."""
    loss: float | None = None
    try:
        while True:
            over, said = _advance(generator, loss)
            if over:
                return said
            if not isinstance(said, MeasureMean):
                raise RunError(
                    f"selector '{name}' yielded a {type(said).__name__}, not a MeasureMean",
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
    """The places of the updates of a mean, and their weights, which sum to 1."""
    rows, places = np.asarray(wanted.rows), {row: i for i, row in enumerate(facts.rows.tolist())}
    known = rows.ndim == 1 and all(row in places for row in rows.tolist())
    if not known or len(set(rows.tolist())) != len(rows):
        raise RunError(
            f"selector '{name}' has a mean of rows {rows.tolist()} measured; give rows of clients "
            "whose update is in, each once",
            selector=name,
        )
    chosen, weights = [places[row] for row in rows.tolist()], wanted.weights
    if weights is None:
        weights = facts.samples[chosen]
    sound = weights.shape == rows.shape and np.isfinite(weights).all() and (weights > 0).all()
    total = float(weights.sum()) if sound else math.inf
    if not math.isfinite(total):
        raise RunError(
            f"selector '{name}' has a mean of {len(rows)} updates measured with weights "
            f"{weights.tolist()}; give a finite one above 0 for each",
            selector=name,
        )
    return chosen, weights / total if chosen else weights


def _check(judgement: Judgement, facts: UpdateFacts, name: str) -> None:
    strangers = sorted(set(judgement.set_aside) - set(facts.rows.tolist()))
    if strangers:
        raise RunError(
            f"selector '{name}' sets row {strangers[0]} aside, of which there is no update",
            selector=name,
        )
    if len(judgement.set_aside) == len(facts.rows):
        raise RunError(
            f"selector '{name}' sets all {len(facts.rows)} updates of round {facts.round} aside; "
            "at least one must stay",
            selector=name,
        )
