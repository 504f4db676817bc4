"""GreedyFed: selects the clients whose updates have improved the model most.

Singhal et al., "Greedy Shapley Client Selection for Communication-Efficient Federated Learning",
2023.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveInt

from potluck.server.selection import (
    Floats,
    Judgement,
    MeasureMean,
    Population,
    RoundOutcome,
    Selection,
    SelectionContext,
    Selector,
    UpdateFacts,
)
from potluck.server.selectors.parts.choosing import TIE_DECIMALS, Cohort
from potluck.server.selectors.updates.update_memory import sweep
from potluck.server.state import State

# Shapley values -----------------------------------------------------------------------------------
# Liu et al., "GTG-Shapley: Efficient and Accurate Participant Contribution Evaluation in Federated
# Learning", 2022, Algorithm 1; the convergence criterion is that of the authors' program.

Coalition = tuple[int, ...]
"""A set of players, sorted."""

_LEAST_PERMUTATIONS: Final = 30
_LOOKED_AT: Final = 10
_CONVERGED: Final = 0.05


def shapley_values(
    players: int, generator: np.random.Generator, *, tolerance: float, permutations: int
) -> Generator[Coalition, float, Floats]:
    """Yield coalitions, each once, and receive the value of each; return the Shapley value of each
    player.

    tolerance: once the value of a permutation's first players is within this distance of the value
    of all players, the players that follow add nothing. If the value of all players is within this
    distance of the empty coalition's value, all Shapley values are 0. permutations: maximum number
    of permutations, rounded up to a multiple of players. Stops earlier if the last means differ by
    at most 5 % on average.
    """
    of_none = yield ()
    of_all = yield tuple(range(players))
    known: dict[Coalition, float] = {(): of_none, tuple(range(players)): of_all}
    if abs(of_all - of_none) <= tolerance:
        return np.zeros(players)
    total, means = np.zeros(players), list[Floats]()
    while len(means) < permutations and not _converged(means):
        for leader in range(players):
            others = generator.permutation([each for each in range(players) if each != leader])
            members, worth = list[int](), of_none
            for player in (leader, *others.tolist()):
                if abs(of_all - worth) <= tolerance:
                    break
                members.append(int(player))
                coalition = tuple(sorted(members))
                if coalition not in known:
                    known[coalition] = yield coalition
                total[player] += known[coalition] - worth
                worth = known[coalition]
            means.append(total / (len(means) + 1))
    return means[-1]


def _converged(means: list[Floats]) -> bool:
    if len(means) < _LEAST_PERMUTATIONS:
        return False
    last = np.array(means[-_LOOKED_AT:])
    differences = np.abs(last - last[-1]) / (np.abs(last[-1]) + 1e-12)
    return bool(differences.mean(axis=1).max() <= _CONVERGED)


# The selector -------------------------------------------------------------------------------------

_WORST: Final = 1e9
"""Largest absolute loss; a loss that is not finite is replaced by it."""


@dataclass(frozen=True, kw_only=True)
class GreedyFed(Selector):
    """Selects the clients whose updates improved the model most, by Shapley values.

    A client's value in a round is the gain that its update brings to means of other updates,
    measured by the loss on the coordinator's own evaluation data; updates are weighted by their
    samples. cumulative: how a client's values are combined over the rounds with its update: `mean`,
    as in the authors' program; `sum`; or `exponential`, memory · before + (1 - memory) · new.
    tolerance, permutations: as in `shapley_values`. A round evaluates up to 2^updates means, and at
    most permutations · updates.

    Clients that were never picked come first, drawn uniformly. Clients that were picked and never
    sent an update come last. O(K log K).
    """

    cumulative: Literal["mean", "sum", "exponential"] = "mean"
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.75
    tolerance: NonNegativeFloat = 1e-4
    permutations: PositiveInt = 200

    measures = True

    def init(self, population: Population) -> State:
        """Return the initial state: for each row, its number of picks, its number of values, and
        its combined value."""
        return State(arrays=_grown({}, len(population)))

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Select never-picked clients first, then other clients by value."""
        generator = context.generator("greedyfed")
        cohort = Cohort(context, generator)
        arrays = _grown(state.arrays, len(context.population))
        sweep(cohort, arrays, context)
        shuffled = generator.permutation(context.available)
        shuffled = shuffled[(arrays["rounds"][shuffled] > 0) & ~np.isin(shuffled, cohort.rows)]
        values = self._values(arrays)[shuffled]
        best = np.argsort(-values.round(TIE_DECIMALS), kind="stable")[: cohort.missing]
        reasons = [f"Shapley value {value:.4g}" for value in values[best].tolist()]
        cohort.extend(shuffled[best].tolist(), reasons)
        cohort.draw(cohort.missing, "no value known; drawn uniformly")
        return cohort.selection()

    def judge(
        self,
        state: State,
        facts: UpdateFacts,
    ) -> Generator[MeasureMean, float, Judgement]:
        """Compute Shapley values, by requesting the losses of means of some updates; exclude no
        update."""
        reckoning = shapley_values(
            len(facts.rows),
            facts.generator("greedyfed"),
            tolerance=self.tolerance,
            permutations=self.permutations,
        )
        coalition = next(reckoning)
        while True:
            loss = yield MeasureMean(rows=facts.rows[list(coalition)])
            try:
                coalition = reckoning.send(-max(-_WORST, min(loss, _WORST)))
            except StopIteration as ended:
                return Judgement(values={"shapley": ended.value})

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Add this round's values to the clients' combined values."""
        arrays = _grown(state.arrays, int(outcome.cohort.max(initial=-1)) + 1)
        arrays = {name: array.copy() for name, array in arrays.items()}
        arrays["picks"][outcome.cohort] += 1
        found = outcome.judgement.values.get("shapley")
        if outcome.facts is not None and found is not None:
            rows = outcome.facts.rows
            if self.cumulative == "exponential":
                kept = np.where(arrays["rounds"][rows] > 0, self.memory, 0.0)
                arrays["value"][rows] = kept * arrays["value"][rows] + (1 - kept) * found
            else:
                arrays["value"][rows] += found
            arrays["rounds"][rows] += 1
        return State(arrays=arrays)

    def _values(self, arrays: Mapping[str, NDArray[Any]]) -> Floats:
        if self.cumulative != "mean":
            return arrays["value"]
        values: Floats = arrays["value"] / np.maximum(arrays["rounds"], 1)
        return values


def _grown(arrays: Mapping[str, NDArray[Any]], clients: int) -> dict[str, NDArray[Any]]:
    """Return copies with rows for clients that have joined since the last round."""
    kinds = {"picks": np.int64, "rounds": np.int64, "value": np.float64}
    grown: dict[str, NDArray[Any]] = {}
    for name, kind in kinds.items():
        known: NDArray[Any] = arrays.get(name, np.zeros(0, dtype=kind))
        more = max(0, clients - len(known))
        grown[name] = np.append(known, np.zeros(more, dtype=kind))
    return grown
