"""K-Vib: draws clients so that the weighted mean of their updates varies least.

Zeng et al., "Enhanced Federated Optimization: Adaptive Unbiased Client Sampling with Reduced
Variance", 2025. The arithmetic is that of the sampler in the authors' repository, except for the
points below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat

from potluck.server.selection import (
    Floats,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
    UpdateFact,
)
from potluck.server.selectors.parts.choosing import Cohort, relative_samples
from potluck.server.selectors.parts.inclusion import least_variance, systematic
from potluck.server.selectors.parts.reported import plausible
from potluck.server.state import State

_FACTOR = 100.0
"""Maximum plausible norm of an update, as a multiple of the clients' median; larger norms are
limited to it."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class KVib(Selector):
    """Draws clients with large earlier updates more often, and weights them less.

    A client is drawn with probability p. Its feedback is π = λ‖Δ‖, where λ is its share of the
    samples and Δ its update. W is the sum of its earlier π²/p. The p of all K clients minimise
    Σ (W + γ)/p and sum to the cohort's size. p is then mixed with a uniform draw of share θ. An
    update is weighted by λ/p, so that the weighted sum is unbiased.

    regularization: γ in units of the mean of π², times K/(θ·count). Larger draws more uniformly.
    rounds: number of rounds T in θ = (K/(T·count))^⅓; 0 for the run's number, or 1,000 if unknown.
    weights: `inverse` for λ/p. `samples` for strategies that accept no weights: the mean is then
    biased towards clients with large updates, and feedback is divided by the p that a client has if
    all are available and T is `rounds`, or 1,000.

    The cohort is drawn by systematic sampling: it has exactly `count` clients, each with its
    probability p. The authors' sampler draws clients independently, so the size varies. K is the
    number of available clients. Unknown numbers of samples are replaced by the mean. O(K log K).
    """

    regularization: PositiveFloat = 0.1
    rounds: NonNegativeInt = 0
    weights: Literal["inverse", "samples"] = "inverse"

    needs_facts = frozenset({UpdateFact.NORM})

    def __post_init__(self) -> None:
        # the dataclass is frozen
        object.__setattr__(self, "sets_weights", self.weights == "inverse")

    def init(self, population: Population) -> State:
        """Return a state without feedback.

        For each row, it has the client's W. The scalars `sum` and `number` are the sum and the
        number of all π² so far.
        """
        return State(
            scalars={"sum": 0.0, "number": 0}, arrays={"feedback": np.zeros(len(population))}
        )

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return a cohort that includes each available client with its probability."""
        generator = context.generator("k-vib")
        cohort = Cohort(context, generator)
        if not cohort.size:
            return cohort.selection(np.zeros(0) if self.sets_weights else None)
        state = _grown(state, len(context.population))
        rows = generator.permutation(context.available)
        chances = self._probabilities(state, rows, cohort.size, context.rounds)
        drawn = systematic(chances, cohort.size, generator)
        reasons = [f"drawn with probability {chance:.3g}" for chance in chances[drawn].tolist()]
        cohort.extend(rows[drawn].tolist(), reasons)
        shares = relative_samples(context.population.samples, len(context.population))
        weights = shares[rows[drawn]] / chances[drawn]
        return cohort.selection(weights if self.sets_weights else None)

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Add the feedback of the round's updates."""
        state = _grown(state, int(outcome.selected.max(initial=-1)) + 1)
        facts = outcome.facts
        if facts is None or not len(facts.rows):
            return state
        shares = relative_samples(outcome.samples, len(state.arrays["feedback"]))[facts.rows]
        norms = np.nan_to_num(plausible(facts.norms, factor=_FACTOR))
        squares = np.square(shares * norms)
        if self.sets_weights:
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                chances = np.nan_to_num(shares / facts.samples, nan=1.0)
        else:
            everyone = np.arange(len(state.arrays["feedback"]))
            chances = self._probabilities(state, everyone, len(outcome.selected), 0)[facts.rows]
        chances = np.clip(chances, _ROUNDING, 1.0)
        feedback = state.arrays["feedback"].copy()
        feedback[facts.rows] += squares / chances
        return State(
            scalars={
                "sum": _number(state, "sum") + float(squares.sum()),
                "number": int(_number(state, "number")) + len(squares),
            },
            arrays={"feedback": feedback},
        )

    def _probabilities(self, state: State, rows: Rows, count: int, rounds: int) -> Floats:
        """Return the probability of each of these rows, in (0, 1]; they sum to `count`."""
        clients, horizon = len(rows), self.rounds or rounds or 1000
        mixed = min(1.0, (clients / (horizon * count)) ** (1 / 3))
        number = int(_number(state, "number"))
        typical = _number(state, "sum") / number if number else 0.0
        gamma = self.regularization * typical * clients / (mixed * count)
        found = least_variance(np.sqrt(state.arrays["feedback"][rows] + gamma), count)
        result: Floats = (1 - mixed) * found + mixed * count / clients
        return result


def _number(state: State, name: str) -> float:
    value = state.scalars[name]
    return float(value) if isinstance(value, int | float) else 0.0


def _grown(state: State, clients: int) -> State:
    """Return the state with rows for clients that have joined since the last round."""
    more = max(0, clients - len(state.arrays["feedback"]))
    feedback = np.append(state.arrays["feedback"], np.zeros(more))
    return State(scalars=state.scalars, arrays={"feedback": feedback})
