"""REFL: whoever is least likely to be there again goes first (ALGORITHMS §8.2).

Abdelmoniem, Sahu, Canini and Fahmy, "REFL: Resource-Efficient Federated Learning" (EuroSys 2023).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeInt

from potluck.server.selection import (
    Answers,
    Ask,
    Floats,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.selectors.parts.choosing import TIE_DECIMALS, Cohort
from potluck.server.selectors.parts.reported import LARGEST, column
from potluck.server.state import State

_KIND = "availability"


@dataclass(frozen=True, kw_only=True)
class Refl(Selector):
    """Takes those first whose chance to be there from μ to 2μ seconds from now is least, ties at
    random.

    μ: a moving average of what the slowest training of each round took, of which the past makes up
    `memory`. rest: for how many rounds a client that was selected is not asked, as long as others
    suffice; then those come first that have rested longest. Who tells no chance comes after those
    that do. O(K).
    """

    rest: NonNegativeInt = 5
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.25

    asks = frozenset({_KIND})

    def init(self, population: Population) -> State:
        """Nobody was selected."""
        return State(arrays={"selected_in": np.zeros(len(population), dtype=np.int64)})

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """The cohort, the least available first."""
        generator = context.generator("refl")
        cohort = Cohort(context, generator)
        if not cohort.size:
            return cohort.selection()
        selected_in = _grown(state.arrays["selected_in"], len(context.population))
        available = context.available
        last = selected_in[available]
        has_rested = (last == 0) | (context.round - last > self.rest)
        rested = available[has_rested]
        if len(rested):
            yield from self._from_rested(cohort, rested, state, generator)
        self._from_resting(cohort, available[~has_rested], selected_in, context)
        return cohort.selection()

    def _from_rested(
        self, cohort: Cohort, rested: Rows, state: State, generator: np.random.Generator
    ) -> Generator[Ask, Answers, None]:
        mean = _mean_of(state) or 0.0
        span: dict[str, float] = {"begin": mean, "end": 2 * mean}
        answers = yield Ask(rows=rested, kind=_KIND, parameters=span)
        told = column(answers, _KIND, int(rested.max()) + 1)[rested]
        chances = np.where((told >= 0) & (told <= 1), told, np.nan)
        for place in _least(chances, cohort.missing, generator):
            reason = f"there after {mean:.3g} s with chance {chances[place]:.3g}"
            if np.isnan(chances[place]):
                reason = "did not tell its chance to be there; drawn uniformly"
            cohort.add(int(rested[place]), reason)

    def _from_resting(
        self, cohort: Cohort, resting: Rows, selected_in: Rows, context: SelectionContext
    ) -> None:
        ages = (context.round - selected_in[resting]).astype(np.float64)
        generator = context.generator("refl/resting")
        for place in _least(-ages, cohort.missing, generator):
            cohort.add(
                int(resting[place]), f"too few have rested; selected {ages[place]:.0f} rounds ago"
            )

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """With who was selected, and how long the round was."""
        clients = 1 + int(outcome.selected.max(initial=-1))
        selected_in = _grown(state.arrays["selected_in"], clients)
        selected_in[outcome.selected] = outcome.round
        mean = _mean_of(state)
        sound = outcome.seconds[np.isfinite(outcome.seconds) & (outcome.seconds >= 0)]
        if len(sound):
            slowest = min(float(sound.max()), LARGEST)
            mean = slowest if mean is None else next_mean(mean, slowest, self.memory)
        scalars = {} if mean is None else {"mean_seconds": mean}
        return State(scalars=scalars, arrays={"selected_in": selected_in})


def _mean_of(state: State) -> float | None:
    """μ; None before any training is known."""
    found = state.scalars.get("mean_seconds")
    return float(found) if isinstance(found, float) else None


def next_mean(mean: float, seconds: float, memory: float) -> float:
    """The moving average after one more round."""
    return memory * mean + (1 - memory) * seconds


def _least(values: Floats, size: int, generator: np.random.Generator) -> list[int]:
    """Positions of the `size` least, in their order, NaN last; those that are as good as equal at
    random."""
    keys = np.where(np.isnan(values), np.inf, values.round(TIE_DECIMALS))
    size = min(size, len(keys))
    if size < 1:
        return []
    last = np.partition(keys, size - 1)[size - 1]
    below = generator.permutation(np.flatnonzero(keys < last))
    below = below[np.argsort(keys[below], kind="stable")]
    tied = generator.choice(np.flatnonzero(keys == last), size - len(below), replace=False)
    return [*below.tolist(), *tied.tolist()]


def _grown(selected_in: Rows, clients: int) -> Rows:
    """A copy, with rows for those that have joined."""
    more = max(0, clients - len(selected_in))
    return np.concatenate([selected_in, np.zeros(more, dtype=np.int64)])
