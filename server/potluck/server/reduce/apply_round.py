"""Computes the next model: weights and combines a round's updates, then applies the strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import PluginError
from potluck.common.run_file.run_settings import SampleLimits
from potluck.common.tensors.encoding import EncodedUpdate
from potluck.common.tensors.tensor_drafts import TensorDraft
from potluck.common.tensors.tensor_files import NamedTensors, TensorFile, Tensors
from potluck.server.plan.cohort_limits import counted
from potluck.server.reduce.reduction import reduce
from potluck.server.reduce.update_facts import gram
from potluck.server.reduce.update_files import (
    OneUpdate,
    SpooledUpdate,
    UpdateFiles,
    renormalized,
)
from potluck.server.reduce.update_norms import tensor_norms, update_norms
from potluck.server.state import State
from potluck.server.strategy import (
    Combine,
    Counts,
    RoundContext,
    Statistic,
    Strategy,
    UpdateStatistics,
    Weights,
)


@dataclass(frozen=True, kw_only=True)
class RoundNumbers:
    """Facts about a round that a strategy receives together with the round's updates.

    round: number of the round, from 1. clients: K, number of clients that have joined the run.
    buffers: names of floating-point tensors of the model that are not parameters. limits: limits on
    the number of samples by which a client's update is weighted. weights: weight of each client's
    update, if the selector sets the weights; else empty.
    """

    round: int
    clients: int
    buffers: frozenset[str]
    limits: SampleLimits = field(default_factory=SampleLimits)
    weights: Mapping[str, float] = field(default_factory=dict)

    def counts(self, updates: OpenUpdates) -> Counts:
        """Return the weight of each update, in client order."""
        if self.weights:
            return np.array([self.weights[client] for client in updates.clients])
        samples = np.array([row.samples for row in updates.rows], dtype=np.int64)
        counts = counted(samples, self.limits)
        return counts if updates.factors is None else counts * updates.factors


class OpenUpdates:
    """The update files of a round, opened for reading: in client order, followed by the late ones.

    factors: factor by which each update's weight is multiplied; None without late updates.
    """

    def __init__(
        self,
        updates: Sequence[SpooledUpdate],
        files: UpdateFiles,
        opened: Sequence[TensorFile],
        model: Tensors | None,
    ) -> None:
        self.rows = [update.row for update in updates]
        self.clients = [update.client for update in updates]
        self.dropped = [update.dropped for update in updates]
        self.encoded: list[EncodedUpdate] = [
            files.partial_weights(file, model, update.dropped)
            if update.dropped and model is not None
            else files.weights(file, model if files.delta else None)
            for update, file in zip(updates, opened, strict=True)
        ]
        self.factors: NDArray[np.float64] | None = None
        self._updates, self._files, self._opened, self._model = updates, files, opened, model

    def without(self, clients: Collection[str]) -> OpenUpdates:
        """Return these updates, except those from `clients`."""
        kept = [place for place, client in enumerate(self.clients) if client not in clients]
        if len(kept) == len(self.clients):
            return self
        updates = [self._updates[place] for place in kept]
        opened = [self._opened[place] for place in kept]
        return OpenUpdates(updates, self._files, opened, self._model)

    def joined_by(
        self,
        updates: Sequence[SpooledUpdate],
        opened: Sequence[TensorFile],
        encoded: Sequence[EncodedUpdate],
        factors: Sequence[float],
    ) -> OpenUpdates:
        """Return these updates, followed by the late `updates`.

        encoded: the late updates, rebased to the round's model. factors: weight of each late
        update, relative to an update that is not late.
        """
        both = OpenUpdates(self._updates, self._files, self._opened, self._model)
        both.rows += [update.row for update in updates]
        both.clients += [update.client for update in updates]
        both.dropped += [() for _ in updates]
        both.encoded += encoded
        both.factors = np.array([*([1.0] * len(self.clients)), *factors])
        both._opened = [*self._opened, *opened]
        return both

    def auxiliary(self, name: str) -> list[EncodedUpdate]:
        """Return one auxiliary of every update, i.e. tensors sent in addition to the weights."""
        return [self._files.auxiliary(file, name) for file in self._opened]

    def single(self) -> list[OneUpdate]:
        """Return each update separately, for strategies that read single updates."""
        return [
            OneUpdate(client=client, files=self._files, file=file, encoded=encoded)
            for client, file, encoded in zip(self.clients, self._opened, self.encoded, strict=True)
        ]


@contextmanager
def opened(
    updates: Sequence[SpooledUpdate], files: UpdateFiles, model: Tensors | None
) -> Iterator[OpenUpdates]:
    """Open the updates' files; close them at the end of the block.

    model: the round's model, restricted to the tensors that updates have; may be None if updates
    are complete weights.
    """
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(
                files.leaving_out(u.dropped).open(u.path, compressed=u.row.compressed)
            )
            for u in updates
        ]
        yield OpenUpdates(updates, files, found, model)


def apply_round(
    strategy: Strategy,
    state: State,
    current: TensorFile,
    updates: OpenUpdates,
    numbers: RoundNumbers,
    *,
    draft: TensorDraft | None = None,
) -> tuple[Weights, State]:
    """Return the next model and the strategy's next state.

    current: the whole model. draft: file in which the combined update is stored, in the layout of
    the updates. The returned model may contain views of this file, the returned state must not
    contain any. Raises PluginError if the strategy returns an invalid request, NotFiniteError if
    the result overflows.
    """
    before = NamedTensors.some(current, updates.encoded[0].layout)
    statistics = _statistics(strategy.needs, updates, before, numbers, state)
    combine = renormalized(strategy.weigh(statistics), updates.dropped)
    combined = reduce(updates.encoded, combine, before, norms=statistics.norms, draft=draft)
    context = RoundContext(
        round=numbers.round,
        clients=numbers.clients,
        included=updates.clients,
        weights=combine.weights,
        losses=statistics.losses,
        buffers=numbers.buffers,
        auxiliary=_auxiliaries(strategy.auxiliary, combine, updates),
        updates=updates.single() if strategy.individual else (),
    )
    weights, state = strategy.apply(state, current.arrays, combined, context)
    return weights, state.apart(combined)


def _statistics(
    needs: frozenset[Statistic],
    updates: OpenUpdates,
    current: Tensors,
    round_numbers: RoundNumbers,
    state: State,
) -> UpdateStatistics:
    def numbers(of: Callable[[int], float]) -> NDArray[np.float64]:
        return np.array([of(index) for index in range(len(rows))], dtype=np.float64)

    rows, encoded = updates.rows, updates.encoded
    return UpdateStatistics(
        clients=updates.clients,
        samples=round_numbers.counts(updates),
        steps=np.array([row.steps for row in rows], dtype=np.int64),
        normalizers=numbers(lambda i: rows[i].normalizer or float(max(1, rows[i].steps))),
        losses=numbers(lambda i: np.nan if (loss := rows[i].loss) is None else loss),
        buffers=round_numbers.buffers,
        norms=update_norms(encoded, current) if Statistic.NORMS in needs else None,
        tensor_norms=tensor_norms(encoded, current) if Statistic.TENSOR_NORMS in needs else None,
        gram=gram(encoded, current) if Statistic.GRAM in needs else None,
        state=state,
        tensors=[tensor.name for tensor in current.layout.tensors if tensor.floating],
    )


def _auxiliaries(
    names: frozenset[str], combine: Combine, updates: OpenUpdates
) -> Mapping[str, Weights]:
    unknown = sorted(set(combine.auxiliary) - names)
    if unknown:
        raise PluginError(
            f"the strategy sets weights for '{unknown[0]}', which is not the name of a declared "
            "auxiliary"
        )
    found: dict[str, Weights] = {}
    count = len(updates.clients)
    for name in sorted(names):
        each = updates.auxiliary(name)
        weights = combine.auxiliary.get(name, np.full(count, 1.0 / count))
        # Weighted sums need only the model's layout, so its values stay empty.
        found[name] = reduce(
            each, Combine(weights=weights), NamedTensors(layout=each[0].layout, arrays={})
        )
    return found
