"""Computes the next model from a sum: of masked updates, or of updates that hosts added up.

Single updates are never read. The sum is read block by block, so each thread needs only a few
blocks of private memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import PluginError
from potluck.common.tensors.auxiliary import auxiliary_layout
from potluck.common.tensors.flat import FlatVector, TensorBorders, name_at, unflatten
from potluck.common.tensors.large_arrays import empty
from potluck.common.tensors.tensor_drafts import TensorDraft
from potluck.common.tensors.tensor_files import TensorFile, Tensors, block_is_finite, not_finite
from potluck.server.reduce.apply_round import RoundNumbers
from potluck.server.reduce.blocks import Result, for_each_block
from potluck.server.state import State
from potluck.server.strategy import (
    Combine,
    Reduction,
    RoundContext,
    Strategy,
    Summation,
    UpdateStatistics,
    Weights,
)

BLOCK_ELEMENTS: Final = 2**18
"""Number of elements read at once. With smaller blocks, starting the masks' keystreams would take
more time."""
BlockReader = Callable[[int, int], NDArray[np.float64]]
"""Function that reads elements [begin, end) of a vector; begin is a multiple of `BLOCK_ELEMENTS`.
Thread-safe."""


class Total(Protocol):
    """The sum of a round's updates, and weighted means of the clients' losses and normalizers (the
    divisors of updates in FedNova)."""

    @property
    def weight(self) -> float:
        """The sum of the clients' weights."""
        ...

    @property
    def loss(self) -> float:
        """The weighted mean of the clients' losses."""
        ...

    @property
    def normalizer(self) -> float:
        """The weighted mean of the clients' normalizers; 1 if none is needed."""
        ...

    def mean(self) -> BlockReader:
        """Return a reader of the weighted mean of the clients' differences from the model."""
        ...

    def sum(self, auxiliary: str) -> BlockReader:
        """Return a reader of the unweighted sum of one auxiliary (tensors sent beside the
        weights)."""
        ...


def move_by_sum(
    strategy: Strategy,
    state: State,
    current: TensorFile,
    total: Total,
    clients: Sequence[str],
    numbers: RoundNumbers,
    *,
    draft: TensorDraft | None = None,
) -> tuple[Weights, State]:
    """Return the next model and the strategy's next state, from a sum over these clients.

    The strategy gets statistics in which every client has the mean value, because single clients'
    values are unknown. draft: as for `apply_round`. Raises PluginError if the strategy sets weights
    that differ by client, NotFiniteError if the result overflows.
    """
    combine = strategy.weigh(_alike(total, clients, numbers.buffers, state))
    _check_combine(combine, len(clients))
    factors = _factors(strategy, combine, total, current, numbers.buffers)
    on_top = not combine.difference
    combined = _reduced(total.mean(), factors, current, on_top=on_top, draft=draft)
    context = RoundContext(
        round=numbers.round,
        clients=numbers.clients,
        included=clients,
        weights=combine.weights,
        buffers=numbers.buffers,
        auxiliary={
            name: _auxiliary(total, name, combine, current) for name in sorted(strategy.auxiliary)
        },
    )
    weights, state = strategy.apply(state, current.arrays, combined, context)
    return weights, state.apart(combined)


def _alike(
    total: Total, clients: Sequence[str], buffers: frozenset[str], state: State
) -> UpdateStatistics:
    count = len(clients)
    return UpdateStatistics(
        clients=clients,
        samples=np.full(count, max(1, round(total.weight / count)), np.int64),
        steps=np.zeros(count, np.int64),
        normalizers=np.full(count, total.normalizer),
        losses=np.full(count, total.loss),
        buffers=buffers,
        state=state,
    )


def _check_combine(combine: Combine, clients: int) -> None:
    if combine.reduction is not Reduction.MEAN:
        raise PluginError(
            f"the strategy requests the {combine.reduction} of updates, but only their sum is "
            "known; choose another strategy"
        )
    weights = {"": combine.weights, **combine.tensor_weights, **combine.auxiliary}
    for array in weights.values():
        if array.shape != (clients,) or not np.isfinite(array).all() or np.ptp(array) > 1e-12:
            raise PluginError(
                "the strategy sets different weights for clients with equal statistics, but only "
                "the sum of their updates is known; choose another strategy"
            )


def _factors(
    strategy: Strategy,
    combine: Combine,
    total: Total,
    current: TensorFile,
    buffers: frozenset[str],
) -> dict[str, float]:
    """Return, for each tensor, the factor by which its mean difference is multiplied."""
    normalized = strategy.summation is Summation.NORMALIZED
    factors: dict[str, float] = {}
    for tensor in current.layout.tensors:
        weight = float(combine.tensor_weights.get(tensor.name, combine.weights).sum())
        if not combine.difference and abs(weight - 1.0) > 1e-9:
            raise PluginError(
                f"the strategy's weights add up to {weight:g}; they must add up to 1 unless "
                "`difference` is set"
            )
        rescaled = total.normalizer if normalized and tensor.name not in buffers else 1.0
        factors[tensor.name] = weight * rescaled
    return factors


def _reduced(
    read: Callable[[int, int], NDArray[np.float64]],
    factors: dict[str, float],
    current: Tensors,
    *,
    on_top: bool,
    draft: TensorDraft | None,
) -> Weights:
    """Return factor · mean difference for each tensor, in the model's layout. on_top: True to add
    it to the model."""
    layout = current.layout
    base, borders = FlatVector(current.arrays, layout), TensorBorders(layout)
    result = Result(layout, draft)

    def one_block(begin: int, end: int) -> None:
        values, out = read(begin, end), result.block(begin, end, result.scratch(end - begin))
        for place, name in borders.parts(begin, end):
            values[place] *= factors[name]
        if on_top:
            values += base.block(begin, end)
        with np.errstate(over="ignore"):
            np.copyto(out, values, casting="same_kind")
        if not block_is_finite(out):
            raise not_finite(name_at(layout, begin + int(np.argmin(np.isfinite(out)))))
        result.put(begin, out)

    for_each_block(layout.parameters, BLOCK_ELEMENTS, lambda: one_block, None)
    return result.arrays({t.name: current.arrays[t.name] for t in layout.tensors if not t.floating})


def _auxiliary(total: Total, name: str, combine: Combine, current: TensorFile) -> Weights:
    clients = len(combine.weights)
    weight = float(combine.auxiliary.get(name, np.full(clients, 1.0 / clients))[0])
    layout = auxiliary_layout(current.layout)
    found = empty((layout.parameters,), np.float32)
    read = total.sum(name)

    def one_block(begin: int, end: int) -> None:
        np.multiply(read(begin, end), weight, out=found[begin:end], casting="same_kind")

    for_each_block(found.size, BLOCK_ELEMENTS, lambda: one_block, None)
    return unflatten(found, {}, layout)
