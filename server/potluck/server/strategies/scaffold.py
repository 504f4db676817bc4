"""SCAFFOLD: clients correct their drift by control variates (Karimireddy et al. 2020, Alg. 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveFloat

from potluck.common.disclosure import Weighting
from potluck.common.errors import ConfigurationError
from potluck.common.settings import plugins
from potluck.common.settings.local_training import LocalTraining
from potluck.common.tensors.large_arrays import empty
from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging, equal_shares
from potluck.server.strategies.fednova import FedNova
from potluck.server.strategies.server_step import filled, moved, named, unnamed
from potluck.server.strategy import (
    Combine,
    Correction,
    RoundContext,
    Strategy,
    Summation,
    UpdateStatistics,
    Weights,
)

CONTROL: Final = "control"
"""Name of the auxiliary tensors with control variates. Clients receive the mean c, and also their
own c_k if the coordinator stores it; they send the change c_k⁺ − c_k."""

_CAVEAT: Final = (
    "Adam rescales each corrected gradient, so the correction no longer cancels the drift of "
    "clients exactly, and no convergence proof applies"
)


@dataclass(kw_only=True)
class Scaffold(Strategy):
    """Corrects clients' steps, so that clients with different data don't drift apart.

    Clients step by ∇f_k(y) − c_k + c; c is the mean of all clients' c_k, which start at 0.

    After its steps, a client computes c_k⁺ = c_k − c + (w − y)/(a_k·η) and sends c_k⁺ − c_k in
    addition to its weights. a_k is as in FedNova (the number of steps for plain SGD), η the round's
    learning rate. This doubles the traffic per client and round in both directions.

    keeper: where the c_k are stored. `clients`: each client stores its own; a new c_k is used only
    once its round is committed. A client that lost its state directory can't take part any more,
    because its share of c can't be replaced. `coordinator`: the coordinator stores all c_k (each as
    large as the model, written at each commit), for clients that may lose their disk.

    control: how clients compute their control variates: from the difference of the weights (`way`),
    as in the paper, or from the sum of their `gradients`, which Adam needs. learning_rate: η_g > 0
    of the mean. weights: `equal` over clients, as in the paper, or by `samples`. step: another
    strategy for the server's step, by name or as a table with its options; learning_rate and
    weights are then ignored. Raises ConfigurationError, PluginError.
    """

    learning_rate: PositiveFloat = 1.0
    weights: Literal["equal", "samples"] = "equal"
    keeper: Literal["clients", "coordinator"] = "clients"
    step: str | Mapping[str, object] | None = None
    control: Literal["way", "gradients"] = "way"

    auxiliary = frozenset({CONTROL})

    def __post_init__(self) -> None:
        equal = self.weights == "equal"
        mean = _Mean(rate=self.learning_rate, equal=equal)
        self._step: Strategy = mean if self.step is None else _other_step(self.step)
        self._keeps = self.keeper == "coordinator"
        options = {} if self.control == "way" else {"control": self.control}
        self.correction = Correction(
            name="scaffold", options=options, keeps=not self._keeps, of_gradients=True
        )
        self.needs = self._step.needs
        self.individual = self._keeps or self._step.individual
        self.summation = self._step.summation
        self.by_samples = self._step.by_samples

    def review(self, training: LocalTraining, weighting: Weighting) -> Sequence[str]:
        """Return a remark if clients use Adam. Raises ConfigurationError if clients use Adam and
        `control` is not "gradients"."""
        remarks = self._step.review(training, weighting)
        if training.adaptive and self.control == "gradients":
            return (
                f"strategy scaffold with optimizer {training.optimizer}: {_CAVEAT}",
                *remarks,
            )
        if training.adaptive:
            raise ConfigurationError(
                f"strategy scaffold and optimizer {training.optimizer} are not compatible: "
                "control variates are computed from a client's weight delta, as a mean of "
                'gradients, but Adam rescales each gradient; set training.optimizer = "sgd", or '
                'strategy.control = "gradients"',
                strategy="scaffold",
                optimizer=training.optimizer,
            )
        return remarks

    def init(self, model: Weights) -> State:
        """Return the state with all control variates 0."""
        sums = {
            name: filled(array.shape, 0.0, np.float64)
            for name, array in model.items()
            if array.dtype.kind == "f"
        }
        return _state(self._step.init(model), sums, clients=0, kept={})

    def broadcast(self, state: State) -> Mapping[str, Weights]:
        """Return c, the mean of c_k over the clients that had joined at the last commit."""
        clients = max(1, _clients(state))
        sums = unnamed("sum", state.arrays)
        return {CONTROL: {name: _mean(total, clients) for name, total in sums.items()}}

    def personal(self, state: State, client: str) -> Mapping[str, Weights]:
        """Return the client's control variate c_k if the coordinator stores it, else nothing."""
        if not self._keeps:
            return {}
        kept = unnamed(f"kept/{client}", state.arrays)
        if not kept:
            sums = unnamed("sum", state.arrays)
            kept = {name: np.zeros(array.shape, np.float32) for name, array in sums.items()}
        return {CONTROL: kept}

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the mean that the server's step needs, and the sum of the changes of the clients'
        c_k."""
        ones = np.ones(len(statistics.clients))
        of_step = replace(statistics, state=_step_state(statistics.state))
        return replace(self._step.weigh(of_step), auxiliary={CONTROL: ones})

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Take the server's step, and add Σ (c_k⁺ − c_k)/K to c.

        c is stored as a sum, so that K includes clients that joined late.
        """
        following, step_state = self._step.apply(
            _step_state(state), model, combined, replace(context, auxiliary={})
        )
        changes = context.auxiliary[CONTROL]
        sums = {
            name: np.add(total, changes[name], out=empty(total.shape, total.dtype))
            for name, total in unnamed("sum", state.arrays).items()
        }
        kept = unnamed("kept", state.arrays)
        if self._keeps:
            kept |= self._changed(state, context)
        return following, _state(step_state, sums, clients=context.clients, kept=kept)

    def _changed(self, state: State, context: RoundContext) -> dict[str, NDArray[Any]]:
        changed: dict[str, NDArray[Any]] = {}
        for update in context.updates:
            before = self.personal(state, update.client)[CONTROL]
            change = update.auxiliary(CONTROL)
            after = {name: array + change[name] for name, array in before.items()}
            changed |= named(update.client, after)
        return changed


class _Mean(Averaging):
    """w ← w + η_g·mean Δ, with a mean weighted by samples or equally."""

    def __init__(self, *, rate: float, equal: bool) -> None:
        self._rate, self._equal = rate, equal
        self.by_samples = not equal
        self.summation = Summation.EQUAL if equal else Summation.BY_SAMPLES

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the updates' mean difference from the model, with equal weights or weighted by
        samples."""
        combine = super().weigh(statistics)
        weights = equal_shares(len(statistics.clients)) if self._equal else combine.weights
        return Combine(weights=weights, difference=True)

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return the model after one step of size η_g."""
        return moved(model, combined, context.buffers, lambda _, __, d: self._rate * d), state


def _mean(total: NDArray[Any], clients: int) -> NDArray[np.float32]:
    mean: NDArray[np.float32] = empty(total.shape, np.float32)
    np.divide(total, clients, out=mean, casting="same_kind")
    return mean


def _other_step(step: object) -> Strategy:
    """Return the strategy that the option `step` names. Raises ConfigurationError, PluginError."""
    table = {"name": step} if isinstance(step, str) else step
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigurationError(
            f"strategy scaffold: option 'step' is {step!r}; it must be a strategy's name, or a "
            "table with its name and options",
            option="step",
        )
    name = str(table["name"])
    options = {key: value for key, value in table.items() if key != "name"}
    if name == "scaffold":
        raise ConfigurationError("strategy scaffold can't be its own step; name another strategy")
    strategy = plugins.create(Strategy, name, options)
    if isinstance(strategy, FedNova):
        raise ConfigurationError(
            "strategies scaffold and fednova are not compatible: FedNova rescales each client's "
            "delta by the client's number of steps, but SCAFFOLD's control variates need the "
            "plain mean of the deltas; choose one of the two",
            strategy="scaffold",
            step="fednova",
        )
    if strategy.parts or strategy.needs_profiles:
        raise ConfigurationError(
            f"strategies scaffold and {name} are not compatible: the clients of {name} train "
            "different parts of a model, but SCAFFOLD's control variates are means over all "
            "clients; choose one of the two",
            strategy="scaffold",
            step=name,
        )
    if strategy.trains:
        raise ConfigurationError(
            f"strategies scaffold and {name} are not compatible: {name} trains on the "
            "coordinator, but SCAFFOLD's control variates need the mean of the clients' steps; "
            "choose one of the two",
            strategy="scaffold",
            step=name,
        )
    if strategy.auxiliary:
        raise ConfigurationError(
            f"strategies scaffold and {name} are not compatible: both send additional tensors "
            "and correct the clients' steps, but a client applies only one correction; choose "
            "one of the two",
            strategy="scaffold",
            step=name,
        )
    if strategy.one_way:
        raise ConfigurationError(
            f"strategies scaffold and {name} are not compatible: {name} changes some tensors on "
            "the coordinator, which clients neither train nor correct; choose one of the two",
            strategy="scaffold",
            step=name,
        )
    return strategy


def _state(step: State, sums: Weights, *, clients: int, kept: Mapping[str, NDArray[Any]]) -> State:
    return State(
        scalars={
            **{f"step/{name}": value for name, value in step.scalars.items()},
            "clients": clients,
        },
        arrays=named("step", step.arrays) | named("sum", sums) | named("kept", kept),
    )


def _step_state(state: State) -> State:
    scalars = {
        name.removeprefix("step/"): value
        for name, value in state.scalars.items()
        if name.startswith("step/")
    }
    return State(scalars=scalars, arrays=unnamed("step", state.arrays))


def _clients(state: State) -> int:
    clients = state.scalars["clients"]
    return clients if isinstance(clients, int) else 0
