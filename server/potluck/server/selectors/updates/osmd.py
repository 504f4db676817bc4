"""OSMD: learns by online mirror descent how often to draw each client.

Zhao et al., "Adaptive Client Sampling in Federated Learning via Online Learning with Bandit
Feedback", JMLR 2025. The arithmetic is that of the adaptive sampler with doubling in the authors'
program, except for the points that `docs/reference/selectors/osmd.md` lists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from potluck.server.selection import (
    Floats,
    Population,
    RoundOutcome,
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
"""Maximum plausible norm of an update, as a multiple of the clients' median, and of the longest one
that the rates of learning rest on; larger norms are limited to it."""


@dataclass(frozen=True, kw_only=True)
class Osmd(Selector):
    """Draws clients with large recent updates more often, and weights them less.

    Several experts learn a probability p of each client, each with another rate. The cohort is
    drawn by the mean of their p, weighted by each expert's trust. A client's feedback is a =
    (λ‖Δ‖)², where λ is its share of the samples and Δ its update. After a round, each expert makes
    a step of mirror descent on Σ a/p, the variance of the mean. Experts with a small Σ a/p gain
    trust. Phases last 1, 2, 4, … rounds. At the start of each, all experts have the p by which
    clients are drawn, with new rates and trust.

    floor: α, minimum p of a client, as a multiple of the mean. Larger draws more uniformly.
    weights: `inverse` weights by λ/π, where π is the probability of being in the cohort; the
    weighted sum is unbiased. `samples` for strategies that accept no weights: the mean is then
    biased towards clients with large updates.

    The cohort is drawn by systematic sampling. It has exactly `count` clients. Unknown numbers of
    samples are replaced by the mean. O(K log K), with at most one expert more than phases.
    """

    floor: Annotated[float, Field(gt=0, le=1)] = 0.4
    weights: Literal["inverse", "samples"] = "inverse"

    needs_facts = frozenset({UpdateFact.NORM})

    def __post_init__(self) -> None:
        # the dataclass is frozen
        object.__setattr__(self, "sets_weights", self.weights == "inverse")

    def init(self, population: Population) -> State:
        """Return a state with one expert, for which all clients have the same probability.

        chances: experts × clients, p relative to its
        mean. trust: one per expert, with sum 1. The scalars are the number of the phase, its
        remaining rounds, and the square of the longest λ‖Δ‖ that its rates rest on, or 0.
        """
        return State(
            scalars={"phase": 1, "left": 1, "longest": 0.0},
            arrays={
                "chances": np.ones((1, len(population))),
                "trust": np.ones(1),
            },
        )

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return a cohort that includes each available client with its probability."""
        generator = context.generator("osmd")
        cohort = Cohort(context, generator)
        if not cohort.size:
            return cohort.selection(np.zeros(0) if self.sets_weights else None)
        state = _grown(state, len(context.population))
        rows = generator.permutation(context.available)
        included = least_variance(_mixed(state)[rows], cohort.size)
        drawn = systematic(included, cohort.size, generator)
        reasons = [f"drawn with probability {chance:.3g}" for chance in included[drawn].tolist()]
        cohort.extend(rows[drawn].tolist(), reasons)
        shares = relative_samples(context.population.samples, len(context.population))
        weights = shares[rows[drawn]] / included[drawn]
        return cohort.selection(weights if self.sets_weights else None)

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Let all experts learn from the round's updates, and start the next phase if this one is
        over."""
        state = _grown(state, int(outcome.selected.max(initial=-1)) + 1)
        facts, clients = outcome.facts, state.arrays["chances"].shape[1]
        if facts is None or not len(facts.rows) or clients < 2:
            return state
        norms = np.nan_to_num(plausible(facts.norms, factor=_FACTOR))
        shares = relative_samples(outcome.samples, clients)[facts.rows]
        squares = np.square(shares * norms)
        largest = float(squares.max())
        longest = _number(state, "longest") or largest
        if not longest > 0:
            return state
        with np.errstate(over="ignore"):
            feedback = np.minimum(squares / longest, _FACTOR**2)
        count = len(outcome.selected)
        # the probability of a single draw, relative to the mean, if all clients are available
        drawn = least_variance(_mixed(state), count)[facts.rows] * clients / count
        phase, left = int(_number(state, "phase")), int(_number(state, "left")) - 1
        chances, costs = state.arrays["chances"].copy(), np.zeros(len(state.arrays["trust"]))
        for expert, rate in enumerate(rates(len(costs), 2 ** (phase - 1), clients, self.floor)):
            before = chances[expert, facts.rows]
            costs[expert] = (feedback / (before * drawn)).sum() / count**2
            steps = rate * feedback / (before**2 * drawn)
            chances[expert] *= math.exp(-steps.max())
            chances[expert, facts.rows] = before * np.exp(steps - steps.max())
            chances[expert] = projected(chances[expert], self.floor)
        eagerness = self.floor * math.sqrt(8 * count / 2 ** (phase - 1))
        trust = state.arrays["trust"] * np.exp(-eagerness * (costs - costs.min()))
        after = State(
            scalars={"phase": phase, "left": left, "longest": longest},
            arrays={"chances": chances, "trust": trust / trust.sum()},
        )
        return after if left else self._next_phase(after, largest or longest)

    def _next_phase(self, state: State, longest: float) -> State:
        """Return the state at the start of the next phase, which has twice as many rounds."""
        phase, mixed = int(_number(state, "phase")) + 1, _mixed(state)
        number = experts(2 ** (phase - 1), len(mixed), self.floor)
        places = np.arange(1, number + 1)
        return State(
            scalars={"phase": phase, "left": 2 ** (phase - 1), "longest": longest},
            arrays={
                "chances": np.tile(mixed, (number, 1)),
                "trust": (1 + 1 / number) / (places * (places + 1)),
            },
        )


def experts(rounds: int, clients: int, floor: float) -> int:
    """Return the number of experts in a phase of this many rounds. clients: at least 2."""
    growth = 4 * (rounds - 1) * math.log(clients / floor) / math.log(clients)
    return math.ceil(0.5 * math.log2(1 + growth)) + 1


def rates(number: int, rounds: int, clients: int, floor: float) -> Floats:
    """Return the experts' rates, each twice the one before it, for probabilities and feedback
    relative to their mean and maximum."""
    first = floor**3 * math.sqrt(math.log(clients) / (2 * rounds))
    doubled: Floats = first * np.exp2(np.arange(number))
    return doubled


def projected(values: Floats, floor: float) -> Floats:
    """Return the vector with mean 1 and minimum `floor` that has the smallest Kullback–Leibler
    divergence from these values.

    values: ≥ 0, the largest at least `floor`. The result is max(floor, s · value) for a common s.
    """
    above, fixed = values, 0.0
    while len(above):
        scale = (len(values) - fixed) / above.sum()
        still = above[scale * above >= floor]
        if len(still) == len(above):
            found: Floats = np.maximum(floor, scale * values)
            return found
        fixed, above = floor * (len(values) - len(still)), still
    return np.ones(len(values))  # only by rounding, if `floor` is 1 or nearly so


def _mixed(state: State) -> Floats:
    """Return the clients' probabilities, relative to the mean: those of the experts, weighted by
    trust."""
    mixed: Floats = np.zeros(state.arrays["chances"].shape[1])
    # one after another, since a product of matrices may sum in another order elsewhere
    for share, chances in zip(state.arrays["trust"], state.arrays["chances"], strict=True):
        mixed += share * chances
    return mixed


def _number(state: State, name: str) -> float:
    value = state.scalars[name]
    return float(value) if isinstance(value, int | float) else 0.0


def _grown(state: State, clients: int) -> State:
    """Return the state with columns for clients that have joined since the last round. They have
    the mean probability."""
    chances = state.arrays["chances"]
    more = max(0, clients - chances.shape[1])
    if not more:
        return state
    grown = np.hstack([chances, np.ones((len(chances), more))])
    return State(scalars=state.scalars, arrays={**state.arrays, "chances": grown})
