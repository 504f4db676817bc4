"""Oort: prefers clients with large losses and short trainings.

Lai et al., "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI 2021.
Details that the paper leaves open follow its authors' programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveInt

from potluck.server.selection import (
    Floats,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.selectors.parts.choosing import Cohort, draw_weighted, samples_or_mean
from potluck.server.selectors.parts.durations import longest
from potluck.server.selectors.parts.reported import LARGEST, plausible
from potluck.server.state import State

Share = Annotated[float, Field(ge=0, le=1)]
Percentage = Annotated[float, Field(ge=0, le=100)]

UTILITY = "utility"
"""Name of the number that a client reports with its update: |B| · sqrt(mean squared loss) over its
samples B."""

_FACTOR = 100.0
_RETRIED = 0.1
"""Share of the rounds in which a client is new again whose only trainings have failed."""
_NARROW = 1e-9
_FLAT, _SHARP = 0.1, 5.0
"""Relative changes of the utility, for the pacer: up to the first value, the utility counts as
flat; from the second value on, its change counts as large."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Options of the clients' scores. penalty: exponent of the penalty for slow clients. clip:
    quantile to which utilities are limited."""

    penalty: float
    clip: float

    def scores(self, utilities: Floats, rounds: Floats, *, round_number: int) -> Floats:
        """Return (min(U, clip) − min) / range + √(0.1 ln R / L), ≥ 0. utilities: U. rounds: L ≥ 1,
        the round in which each client was last seen. round_number: R."""
        return self.exploited(utilities) + staleness(rounds, round_number)

    def exploited(self, utilities: Floats) -> Floats:
        """Return utilities scaled to [0, 1]; 0 if all are equal. utilities: at least one number,
        none of them NaN."""
        clipped = np.minimum(utilities, np.quantile(utilities, self.clip))
        spread = clipped.max() - clipped.min()
        if spread <= _NARROW * clipped.max():
            return np.zeros(len(clipped))
        scaled: Floats = (clipped - clipped.min()) / spread
        return scaled

    def speed(self, seconds: Floats, preferred: float) -> Floats:
        """Return (T / t)^penalty if a client takes t > T seconds; return 1 for other clients, and
        if t is unknown. preferred: T."""
        slower = seconds > preferred
        result = np.ones(len(seconds))
        result[slower] = (preferred / seconds[slower]) ** self.penalty
        return result


def staleness(rounds: Floats, round_number: int) -> Floats:
    """Return √(0.1 ln R / L): older knowledge is less certain. rounds: L ≥ 1, the round in which
    each client was last seen. round_number: R."""
    bonus: Floats = np.sqrt(0.1 * math.log(round_number) / rounds)
    return bonus


def preferred_seconds(seconds: Floats, percentile: float) -> float:
    """Return T, this percentile of the known durations. T is infinite from the 100th percentile on,
    or if no duration is known."""
    known = seconds[~np.isnan(seconds)]
    if not len(known) or percentile >= 100:
        return math.inf
    return float(np.percentile(known, percentile, method="inverted_cdf"))


@dataclass(frozen=True, kw_only=True)
class Oort(Selector):
    """Prefers clients with large losses and short trainings; also tries new clients.

    Selects by utility per second. A client's utility is a number that the client computed from its
    losses in its last training. exploration: initial share of new clients in a cohort; it is
    multiplied by exploration_decay in each round, down to exploration_minimum. penalty: exponent
    for clients slower than the preferred duration. percentile: the preferred duration is this
    percentile of the durations, at the start. After every pacer_rounds rounds, pacer_step is added
    to the percentile if the cohorts' utility has become flat, and subtracted if it changed
    fivefold. cutoff: clients whose score is at least this share of the last chosen client's score
    take part in the draw. clip: quantile above which utilities count as equal.

    A client that failed keeps its utility, and the deadline is used as its duration. If none of its
    trainings has succeeded, it counts as new in a tenth of the rounds only. A client that reports
    no utility has none. Needs no profile. O(K).
    """

    exploration: Share = 0.9
    exploration_decay: Share = 0.98
    exploration_minimum: Share = 0.2
    penalty: NonNegativeFloat = 2.0
    pacer_rounds: PositiveInt = 20
    pacer_step: Percentage = 5.0
    percentile: Percentage = 10.0
    cutoff: Share = 0.95
    clip: Share = 0.95

    reports = frozenset({UTILITY})

    @property
    def _scoring(self) -> Scoring:
        return Scoring(penalty=self.penalty, clip=self.clip)

    def init(self, population: Population) -> State:
        """Return a state in which no client was selected.

        For each row, it has the utility, the seconds (NaN: unknown) and the round when the client
        was last seen (0: never). It also has, for the last 2 · pacer_rounds rounds, the mean
        utility of the clients that were chosen by score.
        """
        clients = len(population)
        return State(
            scalars={"percentile": self.percentile},
            arrays={
                "utility": np.full(clients, np.nan),
                "seconds": np.full(clients, np.nan),
                "last_seen": np.zeros(clients, dtype=np.int64),
                "window": np.zeros(0),
            },
        )

    def exploration_in(self, round_number: int) -> float:
        """Return ε, the share of new clients in a round. round_number: from 1."""
        decayed = self.exploration * self.exploration_decay ** (round_number - 1)
        return max(decayed, min(self.exploration_minimum, self.exploration))

    # Selecting --------------------------------------------------------------------------------

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return (1 − ε) · count clients by score; the others are drawn from the clients never
        seen."""
        generator = context.generator("oort")
        cohort = Cohort(context, generator)
        table = _grown(state, len(context.population)).arrays
        seconds = plausible(table["seconds"], factor=_FACTOR)
        percentile = float(state.scalars["percentile"] or 0.0)
        speed = self._scoring.speed(seconds, preferred_seconds(seconds, percentile))
        was_seen = table["last_seen"][context.available] > 0
        seen, unseen = context.available[was_seen], context.available[~was_seen]
        failed = unseen[~np.isnan(table["seconds"][unseen])]
        if len(failed):  # else a client that always fails would be tried in every round
            fresh = np.setdiff1d(unseen, failed[generator.random(len(failed)) >= _RETRIED])
            unseen = fresh if len(seen) + len(fresh) >= cohort.size else unseen
        exploration = self.exploration_in(context.round)
        known = math.floor((1 - exploration) * cohort.size + 1e-9)
        known = min(max(known, cohort.size - len(unseen)), len(seen))
        self._exploit(cohort, table, seen, speed[seen], context.round, known, generator)
        weights = samples_or_mean(context.population, unseen) * speed[unseen]
        new = unseen[draw_weighted(weights, cohort.missing, generator)]
        cohort.extend(new.tolist(), ["not seen before"] * len(new))
        return cohort.selection()

    def _exploit(
        self,
        cohort: Cohort,
        table: Mapping[str, NDArray[Any]],
        seen: Rows,
        speed: Floats,
        round_number: int,
        count: int,
        generator: np.random.Generator,
    ) -> None:
        if not count:
            return
        utilities = plausible(table["utility"][seen], factor=_FACTOR)
        scores = speed * self._scoring.scores(
            utilities, table["last_seen"][seen], round_number=round_number
        )
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        enough = np.flatnonzero(scores >= self.cutoff * least)
        drawn = enough[draw_weighted(scores[enough], count, generator)]
        reasons = [
            f"utility {utility:.4g}" + (f", slow: {factor:.2f} of its score" if factor < 1 else "")
            for utility, factor in zip(
                utilities[drawn].tolist(), speed[drawn].tolist(), strict=True
            )
        ]
        cohort.extend(seen[drawn].tolist(), reasons)

    # Observing --------------------------------------------------------------------------------

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Store utilities and durations, and adapt the preferred duration."""
        selected = outcome.selected
        grown = _grown(state, int(outcome.cohort.max(initial=-1)) + 1)
        table = {name: array.copy() for name, array in grown.arrays.items()}
        failed = ~np.isin(selected, outcome.included)
        told = outcome.reports.get(UTILITY, np.zeros(len(selected)))
        told = np.where(np.isfinite(told) & (told >= 0), np.minimum(told, LARGEST), 0.0)
        exploited = ~failed & (table["last_seen"][selected] > 0)
        utility = float(told[exploited].mean()) if exploited.any() else 0.0
        table["window"] = np.append(table["window"], utility)[-2 * self.pacer_rounds :]
        table["utility"][selected[~failed]] = told[~failed]
        table["last_seen"][selected[~failed]] = outcome.round
        seconds = np.where(failed, outcome.deadline_seconds, outcome.seconds)
        measured = np.isfinite(seconds) & (seconds >= 0)
        table["seconds"][selected[measured]] = seconds[measured]
        # tried like a failed client, or it would be explored in every round
        unknown = outcome.surplus[np.isnan(table["seconds"][outcome.surplus])]
        table["seconds"][unknown] = longest(outcome)
        return State(
            scalars={"percentile": self._paced(state, table["window"], outcome.round)},
            arrays=table,
        )

    def _paced(self, state: State, window: Floats, round_number: int) -> float:
        """Return the percentile of the durations that is preferred in the next rounds."""
        percentile = float(state.scalars["percentile"] or 0.0)
        if len(window) < 2 * self.pacer_rounds or round_number % self.pacer_rounds:
            return percentile
        before, lately = (
            float(window[: self.pacer_rounds].sum()),
            float(window[self.pacer_rounds :].sum()),
        )
        if before == 0:
            return percentile
        if abs(lately - before) <= _FLAT * before:
            return min(100.0, percentile + self.pacer_step)
        if abs(lately - before) >= _SHARP * before:
            return max(min(self.pacer_step, percentile), percentile - self.pacer_step)
        return percentile


def _grown(state: State, clients: int) -> State:
    """Return the state with rows for clients that have joined since the last round."""
    arrays = dict(state.arrays)
    more = max(0, clients - len(arrays["last_seen"]))
    for name in ("utility", "seconds"):
        arrays[name] = np.append(arrays[name], np.full(more, np.nan))
    arrays["last_seen"] = np.append(arrays["last_seen"], np.zeros(more, dtype=np.int64))
    return State(scalars=state.scalars, arrays=arrays)
