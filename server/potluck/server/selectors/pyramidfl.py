"""PyramidFL: selects as Oort does, and adapts the work of each selected client.

Li et al., "PyramidFL: A Fine-grained Client Selection Framework for Efficient Federated Learning",
MobiCom 2022. Details that the paper leaves open follow its authors' program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat

from potluck.common.errors import ConfigurationError
from potluck.server.selection import (
    Floats,
    Population,
    RoundOutcome,
    Selection,
    SelectionContext,
    UpdateFact,
    UpdateFacts,
)
from potluck.server.selectors.oort import Oort, Share
from potluck.server.selectors.parts.durations import within_reason
from potluck.server.selectors.parts.reported import LARGEST
from potluck.server.state import State

_GRADIENT = "gradient"


@dataclass(frozen=True, kw_only=True)
class PyramidFL(Oort):
    """Selects as Oort; options let fast clients train longer and others send less.

    prolong: True if clients that would finish before the round's end make as many additional passes
    as fit, up to `longest` times the run's number. drop: True if clients omit whole tensors from
    their updates; which tensors is drawn again in each round. Among the cohort's clients whose last
    update is known, the one with the largest ‖Δ‖ · samples omits the share `least_dropped` of the
    tensors, the one with the smallest omits `most_dropped`, and the others omit equally spaced
    shares between. Clients with equal values omit the smallest of their shares. Clients seen for
    the first time train and upload as usual.

    A round lasts until its last client is done, not counting spares (`round.over_selection`).
    Durations are for the run's number of passes: if a client made more passes, its duration is
    divided by their ratio. Needs no profile. O(K), and with `drop` one pass over the updates.
    """

    prolong: bool = False
    longest: NonNegativeFloat = 10.0
    drop: bool = False
    least_dropped: Share = 0.1
    most_dropped: Share = 0.6

    def __post_init__(self) -> None:
        if self.least_dropped > self.most_dropped:
            raise ConfigurationError(
                f"least_dropped = {self.least_dropped} is above most_dropped = "
                f"{self.most_dropped}; swap them"
            )
        # The dataclass is frozen, and these class attributes depend on the options.
        object.__setattr__(self, "sets_epochs", self.prolong)
        object.__setattr__(self, "drops_tensors", self.drop)
        object.__setattr__(self, "needs_facts", frozenset({UpdateFact.NORM} if self.drop else ()))

    def init(self, population: Population) -> State:
        """Return Oort's state, with the last ‖Δ‖ · samples / 100 of each row (NaN: unknown)."""
        state = super().init(population)
        unknown = np.full(len(population), np.nan)
        return State(scalars=state.scalars, arrays={**state.arrays, _GRADIENT: unknown})

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Select Oort's cohort, and set the passes and the omitted tensors of each of its
        clients."""
        chosen = super().select(state, context)
        reasons = list(chosen.reasons)
        epochs: NDArray[np.int64] | None = None
        dropped: list[list[str]] | None = None
        if self.prolong:
            epochs = self._epochs(state, chosen, context)
            for place in np.flatnonzero(epochs > context.epochs).tolist():
                reasons[place] += f"; has time for {epochs[place]} passes"
        if self.drop:
            dropped = self._dropped(state, chosen, context)
            for place, names in enumerate(dropped):
                if names:
                    reasons[place] += f"; leaves out {len(names)} of {len(context.tensors)} tensors"
        return replace(chosen, reasons=tuple(reasons), epochs=epochs, dropped=dropped)

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Return Oort's state, with durations scaled to the run's passes, and the sizes of
        updates."""
        if len(outcome.prolonged):
            outcome = replace(outcome, seconds=outcome.seconds / outcome.prolonged)
        after = super().observe(state, outcome)
        gradients = _column(state, len(after.arrays["seconds"]))
        facts = outcome.facts
        if facts is not None and len(facts.norms):
            gradients[facts.rows] = gradient_utilities(facts)
        return State(scalars=after.scalars, arrays={**after.arrays, _GRADIENT: gradients})

    def _epochs(
        self, state: State, chosen: Selection, context: SelectionContext
    ) -> NDArray[np.int64]:
        seconds = _known(within_reason(state.arrays["seconds"]), chosen)
        last = len(chosen.rows) - context.spares
        until = round_seconds(seconds, last)
        # Only the sum of training and transfer time is measured. It is used as the training time.
        # If a client trained for more passes, this time was divided by the ratio of the passes,
        # although the transfer takes the same time then: it comes out too short.
        return passes(seconds, seconds, until, context.epochs, longest=self.longest)

    def _dropped(
        self, state: State, chosen: Selection, context: SelectionContext
    ) -> list[list[str]]:
        generator, names = context.generator("pyramidfl"), list(context.tensors)
        gradients = _known(state.arrays[_GRADIENT], chosen)
        shares = dropped_shares(gradients, self.least_dropped, self.most_dropped)
        return [
            _drawn(names, math.floor(share * len(names) + generator.random()), generator)
            for share in shares.tolist()
        ]


def passes(
    seconds: Floats, computing: Floats, until: float, epochs: int, *, longest: float
) -> NDArray[np.int64]:
    """Return E + min(longest · E, ⌊(T − t) / (t_comp / E)⌋): the number of passes that fit a round.

    seconds: t, total time of a client for E passes, above 0; the result is E if t is NaN or not
    below T. computing: t_comp, the part of t that training takes. until: T. epochs: E.
    """
    quick = seconds < until
    more = np.zeros(len(seconds))
    np.divide((until - seconds) * epochs, computing, out=more, where=quick)
    more = np.minimum(np.floor(more), math.floor(longest * epochs))
    result: NDArray[np.int64] = epochs + more.astype(np.int64)
    return result


def round_seconds(seconds: Floats, last: int) -> float:
    """Return the seconds of a round that waits for its `last` quickest clients; −∞ if no duration
    is known."""
    known = np.sort(seconds[~np.isnan(seconds)])
    return float(known[min(max(last, 1), len(known)) - 1]) if len(known) else -math.inf


def gradient_utilities(facts: UpdateFacts) -> Floats:
    """Return √‖Δ‖² · |B| / 100 of each update, within [0, 10^18]; |B|: number of samples.

    Omitted tensors are assumed to have changed as much as the others.
    """
    norms = np.nan_to_num(facts.norms, nan=0.0, posinf=LARGEST)
    norms = np.clip(norms, 0.0, LARGEST)
    if len(facts.shares):
        norms = np.minimum(norms / np.sqrt(facts.shares), LARGEST)
    found: Floats = norms * np.minimum(facts.samples, LARGEST) / 100
    return found


def dropped_shares(gradients: Floats, least: float, most: float) -> Floats:
    """Return the share of tensors that each client omits.

    It is `least` for the largest gradient, `most` for the smallest, and equally spaced between.
    Equal gradients get equal shares; NaN gets 0.
    """
    known = ~np.isnan(gradients)
    ordered = np.sort(gradients[known])
    ranks = len(ordered) - np.searchsorted(ordered, gradients[known], side="right")
    shares = np.zeros(len(gradients))
    shares[known] = least + (most - least) * ranks / max(1, len(ordered) - 1)
    return shares


def _drawn(names: Sequence[str], count: int, generator: np.random.Generator) -> list[str]:
    """Draw `count` of the names, in their order, but never all of them."""
    count = min(count, len(names) - 1)
    if count < 1:
        return []
    places = generator.choice(len(names), size=count, replace=False)
    return [names[int(place)] for place in np.sort(places)]


def _known(column: Floats, chosen: Selection) -> Floats:
    """Return the values of a column for the cohort's clients; NaN for clients that have joined
    since the last round."""
    found = np.full(len(chosen.rows), np.nan)
    there = chosen.rows < len(column)
    found[there] = column[chosen.rows[there]]
    return found


def _column(state: State, length: int) -> Floats:
    """Return a copy of the stored sizes of updates, with a row for each client."""
    before = state.arrays[_GRADIENT]
    return np.append(before, np.full(max(0, length - len(before)), np.nan))
