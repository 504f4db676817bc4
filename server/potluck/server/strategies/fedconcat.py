"""FedConcat: groups of clients train encoders, then all clients train a head on these encoders
(Diao et al.)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from potluck.common.errors import ConfigurationError
from potluck.common.tensors.layout import Layout
from potluck.server.selection import Population, Signal
from potluck.server.selectors.parts.k_means import k_means, nearest
from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging, equal_shares, shares
from potluck.server.strategies.server_step import moved
from potluck.server.strategy import Combine, RoundContext, UpdateStatistics, Weights

JOINED: Final = "joined"
"""Name of the model's integer tensor that is 1 if the head on the joined encoders is in use, else
0."""
_CENTRES: Final = "centres"
_GROUP: Final = "group/"
_ROUNDS: Final = "rounds"


@dataclass(frozen=True, kw_only=True)
class FedConcat(Averaging):
    """Groups clients by labels and trains an encoder for each group; then trains a head on all
    encoders.

    Phase 1 groups clients by k-means of their label distributions, and runs FedAvg in each group.
    Phase 2, after `rounds` rounds, freezes the groups' encoders; all clients train one linear head
    on the concatenated outputs, with equal weights.

    groups: number of groups, as in the model `concatenation`. A client's group is fixed by the
    first round that is committed after the client joined. The encoder of a group without clients in
    a round's cohort does not change.
    """

    groups: Annotated[int, Field(ge=2)] = 5
    rounds: PositiveInt = 480

    individual = True
    by_samples = False
    needs_profiles = frozenset({Signal.LABEL_COUNTS})
    parts = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "opening", self.rounds)

    def check_model(self, layout: Layout) -> None:
        """Raise ConfigurationError unless the model is a `concatenation` of `groups` encoders."""
        names = layout.by_name
        found = {name.split(".")[1] for name in names if name.startswith("encoders.")}
        if JOINED not in names or found != {str(group) for group in range(self.groups)}:
            raise ConfigurationError(
                f"strategy fedconcat trains {self.groups} encoders and a head on all of them, but "
                'the model has other parts; set [model] name = "concatenation", groups = '
                f"{self.groups}, and `of` to the model that each group trains",
                groups=self.groups,
            )

    def init(self, model: Weights) -> State:  # noqa: ARG002  part of the interface
        """Return a state in which no client has been assigned to a group."""
        return State(scalars={_ROUNDS: 0})

    def enrol(self, state: State, population: Population, seed: int) -> State:
        """Assign new clients to the group with the nearest centre.

        The first clients determine the centres. While they are fewer than `groups`, each new client
        changes the centres, and all clients are assigned again.
        """
        new = [
            row for row, client in enumerate(population.ids) if _GROUP + client not in state.scalars
        ]
        counts = population.label_counts
        if not new or counts is None:
            return state
        centres = state.arrays.get(_CENTRES)
        complete = centres is not None and len(centres) >= self.groups
        rows = new if complete else range(len(population))
        shown = [row for row in rows if np.isfinite(counts[row]).all()]
        if not shown:
            return state
        points = distributions(counts[shown])
        if centres is None or not complete:
            centres = k_means(points, min(self.groups, len(points)), seed=seed)
        of_each = nearest(points, centres)
        found = {_GROUP + population.ids[r]: int(g) for r, g in zip(shown, of_each, strict=True)}
        return State(scalars={**state.scalars, **found}, arrays={_CENTRES: centres})

    def part(self, state: State, client: str) -> int | None:
        """Return the number of the client's group; in phase 2, return `groups`, which stands for
        the head."""
        if self._joins(state):
            return self.groups
        group = state.scalars.get(_GROUP + client, 0)
        return group if isinstance(group, int) else 0

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request each group's mean, weighted by samples; for the head, the mean with equal
        weights."""
        state, clients = statistics.state, statistics.clients
        equal, nothing = equal_shares(len(clients)), np.zeros(len(clients))
        groups = np.array([self.part(state, client) for client in clients])
        of_group = {
            str(group): _within(statistics.samples, groups == group) for group in range(self.groups)
        }
        weights: dict[str, NDArray[np.float64]] = {}
        for name in statistics.tensors:
            part, _, rest = name.partition(".")
            if self._joins(state):
                weights[name] = equal if part == "head" else nothing
            elif part in ("encoders", "heads"):
                weights[name] = of_group[rest.partition(".")[0]]
            else:
                weights[name] = nothing
        return Combine(weights=equal, difference=True, tensor_weights=weights)

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return the next model; the head is in use from the first round of phase 2."""
        joins = self._joins(state)
        following = moved(model, combined, context.buffers, lambda _, __, delta: delta)
        following[JOINED] = np.array(int(joins), model[JOINED].dtype)
        rounds = int(state.scalars[_ROUNDS] or 0) + 1
        return following, State(scalars={**state.scalars, _ROUNDS: rounds}, arrays=state.arrays)

    def _joins(self, state: State) -> bool:
        """Return True in phase 2, in which clients train the head."""
        return int(state.scalars[_ROUNDS] or 0) >= self.rounds


def distributions(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each client's shares of the classes, n × C; equal shares for a row of zeros. Negative
    counts are taken as 0."""
    clipped = counts.clip(min=0.0)
    totals = clipped.sum(axis=1, keepdims=True)
    alike = np.full_like(clipped, 1.0 / clipped.shape[1])
    return np.where(totals > 0, clipped / np.where(totals > 0, totals, 1.0), alike)


def _within(samples: NDArray[Any], members: NDArray[Any]) -> NDArray[np.float64]:
    """Return each member's share of the members' samples; 0 for other clients."""
    weights = np.zeros(len(samples))
    if members.any():
        weights[members] = shares(samples[members])
    return weights
