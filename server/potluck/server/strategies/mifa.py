"""MIFA: remembers the last update of every client, and moves by the mean of all of them.

Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability", 2021, Alg.
1. The authors' programs start in two ways, which are options here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveFloat

from potluck.common.disclosure import Weighting
from potluck.common.settings.local_training import LocalTraining
from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging, equal_shares
from potluck.server.strategies.server_step import filled, moved, named, unnamed
from potluck.server.strategy import Combine, RoundContext, UpdateStatistics, Weights

_LAST: Final = "last"
_SUM: Final = "sum"


@dataclass(frozen=True, kw_only=True)
class Mifa(Averaging):
    """Moves the model by the mean of the last updates of all clients.

    w ← w + η_g · (1/K) Σ_k Δ_k, with the last update Δ_k of each of all K clients.

    For a client that is not available, its last update is used. learning_rate: η_g. wait: True if
    the model does not move until every client has sent an update, as in the paper; a client that
    never sends one then stops the run's progress. Clients that join after that don't stop it again.
    False: Δ_k is 0 until a client sends one.

    The coordinator stores one copy of the model for each client that has sent an update, and a sum
    that is twice as large as the model; all of this is written at each commit. Numbers of samples
    have no effect.
    """

    learning_rate: PositiveFloat = 1.0
    wait: bool = False

    individual = True
    by_samples = False

    def review(self, training: LocalTraining, weighting: Weighting) -> Sequence[str]:  # noqa: ARG002
        """Return a remark if the clients' learning rate falls over the rounds."""
        if training.learning_rate_in(1) == training.learning_rate_in(1_000_000):
            return ()
        remark = (
            "strategy mifa with a learning rate that falls: a stored update keeps its length, "
            "but in the paper its length falls with the learning rate"
        )
        return (remark,)

    def init(self, model: Weights) -> State:
        """Return the state before any client has sent an update."""
        sums = {
            name: filled(array.shape, 0.0, np.float64)
            for name, array in model.items()
            if array.dtype.kind == "f"
        }
        return State(scalars={"remembered": 0, "waits": self.wait}, arrays=named(_SUM, sums))

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the mean difference; only its running statistics are used."""
        return Combine(weights=equal_shares(len(statistics.clients)), difference=True)

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Store the round's updates in the state, and move the model by the mean of all stored
        updates."""
        arrays: dict[str, NDArray[Any]] = dict(state.arrays)
        sums = unnamed(_SUM, state.arrays)
        new = [u.client for u in context.updates if not unnamed(_last(u.client), arrays)]
        remembered = _number(state) + len(new)
        for name, total in sums.items():
            before, after = model[name].astype(np.float32), total.copy()
            for update in context.updates:
                key = f"{_last(update.client)}/{name}"
                change = update.tensor(name) - before
                after += change
                if key in arrays:
                    after -= arrays[key]
                arrays[key] = change
            sums[name] = after
        waits = bool(state.scalars.get("waits", self.wait)) and remembered < context.clients
        scalars = {"remembered": remembered, "waits": waits}
        following = State(scalars=scalars, arrays=arrays | named(_SUM, sums))
        steps = 0.0 if waits else self.learning_rate
        rate = steps / context.clients

        def step(name: str, place: slice, _: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.asarray(sums[name].reshape(-1)[place] * rate)

        return moved(model, combined, context.buffers, step), following


def _last(client: str) -> str:
    return f"{_LAST}/{client}"


def _number(state: State) -> int:
    number = state.scalars["remembered"]
    return number if isinstance(number, int) else 0
