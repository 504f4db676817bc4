"""FedCor: selects the clients whose losses give most information about the other clients' losses.

Tang, Ning, Wang, Sun, Wang, Li and Chen, "FedCor: Correlation-Based Active Client Selection
Strategy for Heterogeneous Federated Learning" (CVPR 2022).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from potluck.common.errors import ConfigurationError
from potluck.common.settings.extras import require
from potluck.server.selection import (
    Answers,
    Ask,
    Floats,
    Population,
    RoundOutcome,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.selectors.parts.choosing import Cohort, samples_or_mean
from potluck.server.selectors.parts.reported import column, plausible
from potluck.server.state import State

MOST_CLIENTS = 10_000
_FACTOR = 100.0
"""Maximum plausible loss, as a multiple of the clients' median; larger losses are limited to it."""


@dataclass(frozen=True, kw_only=True)
class FedCor(Selector):
    """Selects clients from which a Gaussian process expects the largest loss decrease.

    In rounds with a uniform cohort, the process learns how the clients' losses change together.
    warm_up: number of uniform rounds at the start. refresh: number of rounds from one uniform round
    to the next after the warm-up; the authors instead train an extra cohort and discard its
    updates. dimension: number of coordinates of the point that the process assigns to each client.
    memory: factor on the weight of a change of losses, per round of its age. discount: factor on a
    client's expected gain for each time it is selected, until the next refresh. steps,
    learning_rate: settings of the fit after the warm-up; a fit at a refresh takes a tenth of the
    steps.

    In uniform rounds and in the rounds after them, all available clients are asked for their loss.
    Clients that never reported their loss in two consecutive rounds come last. Up to 10,000
    clients: a fit is O(steps · K · dimension²).
    """

    warm_up: Annotated[int, Field(ge=1)] = 15
    refresh: Annotated[int, Field(ge=2)] = 10
    dimension: Annotated[int, Field(ge=1, le=100)] = 15
    memory: Annotated[float, Field(gt=0, le=1)] = 0.95
    discount: Annotated[float, Field(gt=0, le=1)] = 0.95
    steps: Annotated[int, Field(ge=1, le=100_000)] = 1000
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 0.01

    asks_questions = frozenset({"loss"})
    most_clients = MOST_CLIENTS

    def __post_init__(self) -> None:
        require("scipy", "potluck[server]")

    def init(self, population: Population) -> State:
        """Return a state in which no loss is known."""
        return _Known.empty(0, self.dimension).state()  # the first answers add rows

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """Return the cohort: drawn uniformly in uniform rounds, else chosen one client after
        another."""
        if len(context.population) > MOST_CLIENTS:
            raise ConfigurationError(
                f"fedcor supports up to {MOST_CLIENTS:,} clients, but this run has "
                f"{len(context.population):,}; choose another selector (pow-d, uniform)"
            )
        generator = context.generator("fedcor")
        cohort = Cohort(context, generator)
        if not cohort.size:
            return cohort.selection()
        known = _Known.of(state, len(context.population), self.dimension)
        if self._uniform(context.round) or self._learns(context.round):
            answers = yield Ask(rows=context.available, kind="loss")
            known = self._heard(known, [answers], context.round)
        if self._uniform(context.round):
            why = "warm-up" if context.round <= self.warm_up else "refresh"
            cohort.draw(cohort.size, f"{why}: drawn uniformly")
            return cohort.selection()
        self._choose(cohort, known, context, generator)
        cohort.draw(cohort.missing, "no change of its loss is known; drawn uniformly")
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Learn from the round's losses, and discount the selected clients."""
        rows = [outcome.selected, *(answers.rows for answers in outcome.answers)]
        clients = 1 + max(int(each.max(initial=-1)) for each in rows)
        known = _Known.of(state, clients, self.dimension)
        known = self._heard(known, outcome.answers, outcome.round)
        if not self._uniform(outcome.round):
            discounts = known.discounts.copy()
            discounts[outcome.selected] *= self.discount
            known = replace(known, discounts=discounts)
        return known.state()

    def _uniform(self, number: int) -> bool:
        return number <= self.warm_up or (number - self.warm_up) % self.refresh == 0

    def _learns(self, number: int) -> bool:
        """Return True if the previous round was uniform, so that its effect on losses can be
        learned now."""
        return number > self.warm_up and (number - self.warm_up - 1) % self.refresh == 0

    def _choose(
        self,
        cohort: Cohort,
        known: _Known,
        context: SelectionContext,
        generator: np.random.Generator,
    ) -> None:
        from potluck.server.selectors.parts.loss_correlation import chosen  # slow: imports SciPy

        told = np.isfinite(known.changes).sum(axis=0) > 0
        rows = context.available[told[context.available]]
        if not len(rows):
            return
        sizes = samples_or_mean(context.population, rows)
        picks, gains = chosen(
            known.points[rows],
            sizes / sizes.sum(),
            known.discounts[rows],
            min(cohort.size, len(rows)),
            generator,
        )
        cohort.extend(
            rows[picks].tolist(),
            [f"expected to move all losses by {gain:.3g} deviations" for gain in gains.tolist()],
        )

    def _heard(self, known: _Known, heard: Sequence[Answers], number: int) -> _Known:
        """Return the state, updated with the answers to this round's question if one was asked."""
        if not heard:
            return known
        clients = len(known.losses)
        losses = plausible(column(heard[0], "loss", clients), factor=_FACTOR)
        if 0 < known.heard_in == number - 1:
            changes = (losses - known.losses)[None]
            known = replace(
                known,
                changes=np.concatenate([known.changes, changes])[-self.warm_up :],
                rounds=np.append(known.rounds, number)[-self.warm_up :],
            )
        known = replace(known, losses=losses, heard_in=number)
        return self._learned(known) if self._learns(number) else known

    def _learned(self, known: _Known) -> _Known:
        from potluck.server.selectors.parts.loss_correlation import fitted, weighted_mean

        if not len(known.changes):
            return known
        weights = self.memory ** (known.rounds[-1] - known.rounds).astype(np.float64)
        points = fitted(
            known.points,
            known.changes - weighted_mean(known.changes, weights),
            weights,
            steps=max(1, self.steps // 10) if known.fitted else self.steps,
            learning_rate=self.learning_rate,
        )
        return replace(known, points=points, discounts=np.ones_like(known.discounts), fitted=True)


@dataclass(frozen=True, kw_only=True)
class _Known:
    """The state of the selector.

    points: K × dimension, the clients' points. changes: rounds × K, changes of the clients' losses,
    NaN if unknown. rounds: the rounds in which these changes were reported. losses: K, last loss of
    each client. heard_in: round in which `losses` was reported; 0 before the first answers.
    discounts: K, factors on the expected gains.
    """

    points: Floats
    changes: Floats
    rounds: np.ndarray[tuple[int], np.dtype[np.int64]]
    losses: Floats
    discounts: Floats
    heard_in: int = 0
    fitted: bool = False

    @classmethod
    def empty(cls, clients: int, dimension: int) -> _Known:
        from potluck.server.selectors.parts.loss_correlation import beginning

        return cls(
            points=beginning(clients, dimension),
            changes=np.zeros((0, clients)),
            rounds=np.zeros(0, dtype=np.int64),
            losses=np.full(clients, np.nan),
            discounts=np.ones(clients),
        )

    @classmethod
    def of(cls, state: State, clients: int, dimension: int) -> _Known:
        """Load a stored state, and add rows for clients that have joined since the last round."""
        stored = cls(
            **state.arrays,
            heard_in=int(state.scalars["heard_in"] or 0),
            fitted=bool(state.scalars["fitted"]),
        )
        before = len(stored.losses)
        if clients <= before:
            return stored
        new = cls.empty(clients, dimension)
        unknown = np.full((len(stored.changes), clients - before), np.nan)
        return replace(
            stored,
            points=np.concatenate([stored.points, new.points[before:]]),
            changes=np.concatenate([stored.changes, unknown], axis=1),
            losses=np.concatenate([stored.losses, new.losses[before:]]),
            discounts=np.concatenate([stored.discounts, new.discounts[before:]]),
        )

    def state(self) -> State:
        arrays = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("heard_in", "fitted")
        }
        return State(scalars={"heard_in": self.heard_in, "fitted": self.fitted}, arrays=arrays)
