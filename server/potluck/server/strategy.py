"""The extension point for strategies: how updates are combined and how the model changes.

A strategy derives from `Strategy`, or from `strategies.averaging.Averaging`, which is FedAvg. It is
a pure object: its constructor takes its options (from the run file's `[strategy]` table) as keyword
arguments and only stores them; their annotations define the valid values. In each round, the
coordinator calls `weigh` with the statistics of the updates, combines the updates block by block as
`weigh` requests, and calls `apply` with the result. A strategy may store values from round to round
only in the `State` that it returns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from potluck.common.disclosure import Weighting
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import STRATEGIES, Plugin
from potluck.common.tensors.layout import Layout
from potluck.server.selection import Population
from potluck.server.state import State

if TYPE_CHECKING:  # not at run time: torch takes seconds to import, and few strategies need it
    from torch import Tensor, nn

Counts = NDArray[np.int64] | NDArray[np.float64]
Weights = Mapping[str, NDArray[Any]]
"""Tensors of a model, as arrays by name. Floating-point arrays take part in the arithmetic; integer
arrays are copied."""


class Reduction(StrEnum):
    """Method by which the updates of a round are combined into one."""

    MEAN = "mean"
    """Weighted sum of the updates; a mean if the weights sum to 1."""
    MEDIAN = "median"
    """Coordinate-wise median; weights are ignored."""
    TRIMMED_MEAN = "trimmed-mean"
    """Coordinate-wise mean without the smallest and the largest values; `trim` is the share of
    updates cut at each end."""
    CLIPPED_MEAN = "clipped-mean"
    """Weighted mean of the differences from the model, each scaled down to an L2 norm of at most
    `clip`."""
    NEAR_MEDIAN = "near-median"
    """Coordinate-wise mean of the values that are nearest to the median; `nearest` is their number.
    Updates of weight 0 are excluded; other weights are ignored. With an even number of values, the
    median is the lower of the two middle values. Of two values that are equally near, the lower is
    used."""


class Statistic(StrEnum):
    """Statistics that `weigh` can use. Each needs one more pass over the updates."""

    NORMS = "norms"
    """The L2 norm of each update − model."""
    TENSOR_NORMS = "tensor-norms"
    """The L2 norm of update − model, for each tensor."""
    GRAM = "gram"
    """The inner products of all pairs of update − model."""


class Summation(StrEnum):
    """Sums that can be computed from masked updates without revealing a single update."""

    BY_SAMPLES = "by-samples"
    """Mean difference from the model, weighted by samples."""
    EQUAL = "equal"
    """Mean difference from the model, with equal weights."""
    NORMALIZED = "normalized"
    """Mean of the differences, each divided by the client's normalizer (a_k of FedNova), times the
    mean of the normalizers; both means are weighted by samples."""


@dataclass(frozen=True, kw_only=True)
class UpdateStatistics:
    """Statistics of a round's updates, in client order.

    samples: weight of each update: int64 ≥ 1 as disclosed, or float64 > 0 if the selector sets
    weights (`Selection.weights`). steps: int64, number of optimiser steps. normalizers: float64 >
    0, effective number of a client's steps (a_k of FedNova): the distance that these steps would
    cover if the gradient and the learning rate were 1. losses: float64, loss that each client
    reported. buffers: names of the floating-point tensors that are not parameters (running
    statistics). norms: float64, L2 norm of update − model over all floating-point tensors.
    tensor_norms: this norm for each floating-point tensor, by name. gram: updates × updates,
    float64, inner products of update − model over all floating-point tensors. Norms and gram are
    None unless they are in the strategy's `needs`. state: the strategy's state. tensors: names of
    the floating-point tensors that updates have.
    """

    clients: Sequence[str]
    samples: Counts
    steps: NDArray[np.int64]
    normalizers: NDArray[np.float64]
    losses: NDArray[np.float64]
    buffers: frozenset[str] = frozenset()
    norms: NDArray[np.float64] | None = None
    tensor_norms: Mapping[str, NDArray[np.float64]] | None = None
    gram: NDArray[np.float64] | None = None
    state: State = field(default_factory=State)
    tensors: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Combine:
    """How to combine the updates. Every array is float64 with one number per update, in client
    order.

    weights: weights of the updates. tensor_weights: for single tensors, weights that replace
    `weights`; only for a mean. difference: True to combine update − model instead of the update;
    only for a mean. Small differences then keep their precision next to large weights, and the
    weights need not sum to 1. nearest: number of values, for `Reduction.NEAR_MEDIAN`. auxiliary:
    for each auxiliary, the weights of its weighted sum; by default 1/updates for each update.
    """

    weights: NDArray[np.float64]
    reduction: Reduction = Reduction.MEAN
    trim: float = 0.0
    clip: float | None = None
    nearest: int = 0
    tensor_weights: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    difference: bool = False
    auxiliary: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


class ReadableUpdate(Protocol):
    """One client's update, for strategies that read single updates."""

    @property
    def client(self) -> str:
        """The client that sent the update."""
        ...

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return one of the floating-point tensors, decoded into memory."""
        ...

    def weights(self) -> Weights:
        """Return all tensors of the client's model, decoded into memory."""
        ...

    def auxiliary(self, name: str) -> Weights:
        """Return an auxiliary that the client sent with its update."""
        ...


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """Facts about the round that a strategy may use in `apply`.

    round: number of the round, from 1. clients: number of clients that have joined the run,
    selected or not (K). included: the clients whose updates were combined, in client order.
    weights: the weights of their updates, from `weigh`. losses: the losses that these clients
    reported, NaN if a client reported none. buffers: names of the floating-point tensors that are
    not parameters. auxiliary: the combined auxiliaries by name. updates: the included updates,
    which should be read one after another to save memory; empty unless the strategy is
    `individual`.
    """

    round: int
    clients: int
    included: Sequence[str]
    weights: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    losses: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    buffers: frozenset[str] = frozenset()
    auxiliary: Mapping[str, Weights] = field(default_factory=dict)
    updates: Sequence[ReadableUpdate] = ()


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The client's part of a strategy: a plug-in of the group `potluck.corrections`, installed on
    hosts.

    It corrects local steps and computes the auxiliaries that a client sends.

    keeps: True if clients store a state from one training for the next. A client that has lost its
    state fails and reports the reason. descends: True if the plug-in computes the gradients itself.
    The run's objective is then not used, and must be plain cross-entropy. of_gradients: True if the
    plug-in uses a client's data only through the gradients of its steps, which noise can hide.
    """

    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    keeps: bool = False
    descends: bool = False
    of_gradients: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerTraining:
    """Inputs of a strategy's own training on the coordinator.

    network: network on the CPU, with the weights that `apply` returned; it is trained in place.
    weights: function that returns a copy of the network's tensors. load: function that overwrites
    the network's tensors with such a copy, or with those of an update. updates: the round's updates
    in client order, each read separately. inputs: n × …, the task's public data. seed: seed of this
    round's training, in [0, 2^63); it also seeds torch's global generator. round: number of the
    round, from 1. progress: function to call regularly with the completed share, in [0, 1]. labels:
    n, int64, the labels of `inputs`; None unless the strategy declares `needs_labels`.
    """

    network: nn.Module
    weights: Callable[[], Weights]
    load: Callable[[Weights], None]
    updates: Sequence[ReadableUpdate]
    inputs: Tensor
    seed: int
    round: int
    progress: Callable[[float], None]
    labels: Tensor | None = None


class Strategy(Plugin):
    """Base class of strategies: combines updates and changes the model. Called from a worker
    thread."""

    group = STRATEGIES

    auxiliary: frozenset[str] = frozenset()
    """Names of the auxiliaries, which are sent in both directions in addition to the weights. Each
    has the model's floating-point tensors, as float32."""
    correction: Correction | None = None
    """The clients' part of the strategy, which uses the auxiliaries; None if the strategy has no
    such part."""
    needs: frozenset[Statistic] = frozenset()
    """Statistics of the updates that `weigh` needs, in addition to the numbers that clients
    report."""
    individual: bool = False
    """True if the strategy reads single updates, which secure aggregation hides: for reductions
    other than a mean, for norms, or for `RoundContext.updates`."""
    by_samples: bool = True
    """True if updates are weighted by `UpdateStatistics.samples`. If False, the strategy is not
    compatible with selectors that set weights."""
    summation: Summation = Summation.BY_SAMPLES
    """The sum that is computed from masked updates."""
    one_way: tuple[str, ...] = ()
    """Name patterns of tensors that only `apply` changes. Clients receive them, and neither train
    them nor send them back, so updates and `combined` omit them. Not allowed in masked rounds, nor
    with auxiliaries."""
    training: ClassVar[Mapping[str, object]] = {}
    """Settings of local training that the strategy recommends, as in the run file's
    `[training]`."""
    needs_profiles: frozenset[str] = frozenset()
    """Profiles of clients that `enrol` uses."""
    parts: bool = False
    """True if clients train different parts of the model, as `part` returns. `enrol` is then
    called, as with `needs_profiles`."""
    most_clients: int | None = None
    """Maximum number of clients. A run with a larger roster or cohort is refused before it starts.
    If more clients join later, `enrol` should raise RunError."""
    opening: int = 0
    """Number of rounds at the start that only prepare later rounds. During these rounds, the run
    does not stop early, and no model becomes its best model."""
    trains: bool = False
    """True if `train` continues from the model that `apply` returns."""
    needs_labels: bool = False
    """True if `train` needs the labels of the public data."""

    def review(
        self,
        training: LocalTraining,  # noqa: ARG002  for subclasses
        weighting: Weighting,  # noqa: ARG002  likewise
    ) -> Sequence[str]:
        """Return remarks on a run, one sentence each. Called before the run starts.

        training: the clients' settings. weighting: form in which clients disclose their numbers of
        samples. Raises ConfigurationError, with the reason, if the strategy is not compatible with
        these settings.
        """
        return ()

    def enrol(self, state: State, population: Population, seed: int) -> State:  # noqa: ARG002  for subclasses
        """Return the state for a round, updated with the clients' profiles.

        Called before clients are instructed, with the state after the last committed round. It may
        be called again: the same arguments must give the same result. seed: the run's seed.
        """
        return state

    def part(self, state: State, client: str) -> int | None:  # noqa: ARG002  for subclasses
        """Return the number of the part of the model that a client must train, from 0; None for the
        whole model.

        The network defines the parts: its method `use_part` is called with the number before a
        training, and with None after it.
        """
        return None

    def check_model(self, layout: Layout) -> None:
        """Raise ConfigurationError, naming the tensor, if the strategy can't train such a model.

        Called before a run starts, if the model is created then: if clients receive only a part of
        it, if it has `one_way` tensors, or if the strategy has `parts` or `needs_profiles`. layout:
        layout of the tensors that clients receive.
        """

    def init(self, model: Weights) -> State:  # noqa: ARG002  for subclasses
        """Return the strategy's state before round 1."""
        return State()

    def broadcast(self, state: State) -> Mapping[str, Weights]:  # noqa: ARG002  for subclasses
        """Return the auxiliary weights sent to all clients of the next cohort, by name."""
        return {}

    def personal(self, state: State, client: str) -> Mapping[str, Weights]:  # noqa: ARG002  for subclasses
        """Return the auxiliary weights sent to this client only, by name; empty if there are
        none."""
        return {}

    @abstractmethod
    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Return how to combine a round's updates; there is at least one update."""

    @abstractmethod
    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return the next model and the strategy's next state.

        model: the round's model; each access to one of its tensors reads the tensor from a file.
        combined: the combined updates: weights, or the difference from the model if `weigh`
        returned `difference=True`. `apply` may overwrite these arrays.
        """

    def train(self, training: ServerTraining) -> None:
        """Train the network further, in place. Its weights afterwards are the round's model.

        Called in a separate process, which has torch and no data of the coordinator except these
        inputs. The process may be killed at any moment, and `train` is then called again: the same
        network, updates and seed must give the same weights. Raises TrainingError if the training
        fails.
        """
        raise NotImplementedError
