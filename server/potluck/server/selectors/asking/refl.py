"""REFL: selects the clients that are least likely to be available again soon.

Abdelmoniem, Sahu, Canini and Fahmy, "REFL: Resource-Efficient Federated Learning" (EuroSys 2023).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
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
    """Selects the clients that are least likely to be available soon.

    Soon: between μ and 2μ seconds from now. Ties are broken at random. μ: moving average of the
    duration of each round's slowest training. memory: weight of the earlier rounds in this average.
    rest: number of rounds for which a selected client is not asked again if the other clients
    suffice. If they don't, the clients that have rested longest come first. Clients that report no
    probability come after those that do.

    If the run accepts late updates, the cohort is smaller by the number of late updates expected
    within μ seconds, but never empty. A late update is expected if its training, assumed to take as
    long as the client's last one, ends by then, or if that duration is unknown. O(K).
    """

    rest: NonNegativeInt = 5
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.25

    asks_questions = frozenset({_KIND})

    def init(self, population: Population) -> State:
        """Return a state in which no client was selected."""
        return State(arrays=_grown({}, len(population)))

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """Return the cohort, with the clients least likely to be available first."""
        generator = context.generator("refl")
        cohort = Cohort(context, generator)
        if not cohort.size:
            return cohort.selection()
        arrays = _grown(state.arrays, len(context.population))
        cohort.size = max(1, cohort.size - stragglers_expected(state, arrays, context.late))
        selected_in = arrays["selected_in"]
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
        mean = _number(state, "mean_seconds") or 0.0
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
        """Store which clients were selected, and how long the round took."""
        known = np.concatenate([outcome.cohort, outcome.late])
        arrays = _grown(state.arrays, 1 + int(known.max(initial=-1)))
        clock, mean = _number(state, "clock") or 0.0, _number(state, "mean_seconds")
        arrays["selected_in"][outcome.cohort] = outcome.round
        arrays["begun"][outcome.selected] = clock
        came, late = _sound(outcome.seconds), _sound(outcome.late_seconds)
        for rows, seconds in ((outcome.selected, came), (outcome.late, late)):
            told = ~np.isnan(seconds)
            arrays["seconds"][rows[told]] = seconds[told]
        if not np.isnan(came).all():
            slowest = float(np.nanmax(came))
            clock += slowest
            mean = slowest if mean is None else next_mean(mean, slowest, self.memory)
        scalars = {"clock": clock} if mean is None else {"clock": clock, "mean_seconds": mean}
        return State(scalars=scalars, arrays=arrays)


def stragglers_expected(state: State, arrays: Mapping[str, Any], late: Rows) -> int:
    """Return the number of late clients that are expected to send an update within μ seconds, the
    average duration of a round's slowest training."""
    clock, mean = _number(state, "clock") or 0.0, _number(state, "mean_seconds") or 0.0
    left = arrays["seconds"][late] - (clock - arrays["begun"][late])
    return int(np.count_nonzero(np.isnan(left) | (left <= mean)))


def _number(state: State, name: str) -> float | None:
    found = state.scalars.get(name)
    return float(found) if isinstance(found, float) else None


def _sound(seconds: Floats) -> Floats:
    """Return the durations, with NaN in place of negative or infinite ones."""
    return np.where((seconds >= 0) & (seconds <= LARGEST), seconds, np.nan)


def next_mean(mean: float, seconds: float, memory: float) -> float:
    """Return the moving average after one more round. seconds: duration of that round's slowest
    training."""
    return memory * mean + (1 - memory) * seconds


def _least(values: Floats, size: int, generator: np.random.Generator) -> list[int]:
    """Return the positions of the `size` smallest values, in ascending order of the values. NaN
    comes last; ties are broken at random."""
    keys = np.where(np.isnan(values), np.inf, values.round(TIE_DECIMALS))
    size = min(size, len(keys))
    if size < 1:
        return []
    last = np.partition(keys, size - 1)[size - 1]
    below = generator.permutation(np.flatnonzero(keys < last))
    below = below[np.argsort(keys[below], kind="stable")]
    tied = generator.choice(np.flatnonzero(keys == last), size - len(below), replace=False)
    return [*below.tolist(), *tied.tolist()]


def _grown(arrays: Mapping[str, NDArray[Any]], clients: int) -> dict[str, NDArray[Any]]:
    """Return copies of the state's arrays, with rows for clients that have joined since the last
    round.

    selected_in: round of the last selection, 0 if there was none. begun: clock time of that
    selection. seconds: duration of the last training.
    """
    grown: dict[str, NDArray[Any]] = {}
    for name, nothing in (("selected_in", 0), ("begun", 0.0), ("seconds", np.nan)):
        known = arrays.get(name, np.full(0, nothing))
        more = np.full(max(0, clients - len(known)), nothing)
        grown[name] = np.concatenate([known, more])
    return grown
