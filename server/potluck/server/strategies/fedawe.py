"""FedAWE: clients continue from their own last models, and absence scales up their changes.

Xiang et al., "Efficient Federated Learning against Heterogeneous and Non-stationary Client
Unavailability", 2024, and the authors' program.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveFloat

from potluck.common.disclosure import Weighting
from potluck.common.errors import ConfigurationError
from potluck.common.settings.local_training import LocalTraining
from potluck.common.tensors.large_arrays import empty
from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging, equal_shares
from potluck.server.strategies.server_step import named, unnamed
from potluck.server.strategy import Combine, Correction, RoundContext, UpdateStatistics, Weights

START: Final = "start"
"""Name of the auxiliary tensors. Clients receive the models from which they start; they send the
difference between the trained model and their start."""
_LAST: Final = "last/"
_ROUNDS: Final = "rounds"


@dataclass(frozen=True, kw_only=True)
class FedAwe(Averaging):
    """Continues each client's own model, and multiplies its change by the rounds since its last.

    x ← (1/|A|) Σ_{k∈A} (x_k + η_g · (t − t_k) · Δ_k), in round t with the clients A.

    Client k starts from x_k, the model x after its last round t_k, and Δ_k is the change by its
    training. A client's first start is the run's first model, with t_k = 0. Numbers of samples have
    no effect.

    learning_rate: η_g. clip: maximum L2 norm of the mean of (t − t_k) · Δ_k, over all parameters;
    None for no maximum. The authors' program uses 0.5. model: the run's model. `cohort`: x, the
    mean over the round's clients. `clients`: the mean of the x_k of all clients, which the authors
    evaluate.

    The coordinator stores the first model, and the model of each round that is the last round of
    some client; all of this is written at each commit.
    """

    learning_rate: PositiveFloat = 1.0
    clip: PositiveFloat | None = None
    model: Literal["cohort", "clients"] = "cohort"

    auxiliary = frozenset({START})
    correction = Correction(name="fedawe", of_gradients=True)
    individual = True
    by_samples = False

    def review(self, training: LocalTraining, weighting: Weighting) -> Sequence[str]:  # noqa: ARG002
        """Raise ConfigurationError if clients first train the tensors that they keep."""
        if training.kept_epochs:
            raise ConfigurationError(
                "strategy fedawe and training.kept_epochs are not compatible: kept tensors would "
                "be trained with the round's model, not with the client's own start; set "
                "training.kept_epochs = 0",
                strategy="fedawe",
                kept_epochs=training.kept_epochs,
            )
        return ()

    def init(self, model: Weights) -> State:
        """Return the state before any client has taken part."""
        first = {name: _float32(array) for name, array in model.items() if array.dtype.kind == "f"}
        return State(scalars={_ROUNDS: 0}, arrays=named(_start(0), first))

    def broadcast(self, state: State) -> Mapping[str, Weights]:
        """Return the run's first model, from which new clients start."""
        return {START: unnamed(_start(0), state.arrays)}

    def personal(self, state: State, client: str) -> Mapping[str, Weights]:
        """Return the model after the client's last round; nothing for a new client."""
        last = _last_rounds(state)
        return {START: unnamed(_start(last[client]), state.arrays)} if client in last else {}

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the mean of the changes, each multiplied by the rounds since the client's last
        one. Of the mean model, only buffers and integers are used."""
        last, clients = _last_rounds(statistics.state), statistics.clients
        number = _whole(statistics.state.scalars[_ROUNDS]) + 1
        absences = np.array([float(number - last.get(client, 0)) for client in clients])
        return Combine(
            weights=equal_shares(len(clients)), auxiliary={START: absences / len(clients)}
        )

    def apply(
        self,
        state: State,
        model: Weights,  # noqa: ARG002  part of the interface
        combined: Weights,
        context: RoundContext,
    ) -> tuple[Weights, State]:
        """Add the mean change to the mean of the cohort's starts, and store the result as the next
        start of the cohort."""
        last, changes = _last_rounds(state), context.auxiliary[START]
        starts = {number: unnamed(_start(number), state.arrays) for number in {0, *last.values()}}
        mean = _mean(starts, (last.get(client, 0) for client in context.included))
        rate = self.learning_rate * self._shortening(changes, context.buffers)
        moved = {name: _float32(array + rate * changes[name]) for name, array in mean.items()}
        last |= dict.fromkeys(context.included, context.round)
        starts = {number: starts[number] for number in {0, *last.values()} - {context.round}}
        starts[context.round] = moved
        new = max(0, context.clients - len(last))
        of_all = [*last.values(), *[0] * new]
        result: Weights = moved if self.model == "cohort" else _mean(starts, of_all)
        following = {
            name: array
            if name in context.buffers or name not in result
            else result[name].astype(array.dtype)
            for name, array in combined.items()
        }
        arrays: dict[str, NDArray[Any]] = {}
        for number, tensors in starts.items():
            arrays |= named(_start(number), tensors)
        scalars = {_ROUNDS: context.round, **{f"{_LAST}{k}": each for k, each in last.items()}}
        return following, State(scalars=scalars, arrays=arrays)

    def _shortening(self, changes: Weights, buffers: frozenset[str]) -> float:
        """Return the factor, at most 1, that shortens the mean change to `clip`."""
        if self.clip is None:
            return 1.0
        squares = (
            float(np.square(array, dtype=np.float64).sum())
            for name, array in changes.items()
            if name not in buffers
        )
        length = math.sqrt(math.fsum(squares))
        return self.clip / length if length > self.clip else 1.0


def _start(number: int) -> str:
    """Return the prefix of the tensors of the model after a round; 0 for the first model."""
    return f"{START}/{number}"


def _last_rounds(state: State) -> dict[str, int]:
    """Return the last round of each client that has taken part."""
    return {
        name.removeprefix(_LAST): _whole(value)
        for name, value in state.scalars.items()
        if name.startswith(_LAST)
    }


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _mean(starts: Mapping[int, Weights], numbers: Iterable[int]) -> dict[str, NDArray[np.float64]]:
    """Return the mean of some of these models, in float64. numbers: rounds of the models, with
    repetitions."""
    counts = sorted(Counter(numbers).items())
    total = sum(count for _, count in counts)
    return {
        name: np.asarray(
            sum(starts[number][name].astype(np.float64) * count for number, count in counts)
        )
        / total
        for name in starts[0]
    }


def _float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Return a copy of an array as float32."""
    copied = empty(array.shape, np.float32)
    copied[...] = array
    return copied
