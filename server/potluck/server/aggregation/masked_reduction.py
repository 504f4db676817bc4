"""The reduction of masked updates: words summed block by block across their files, then unmasked.

As in `reduction`, a block of the floating-point vector is read from every file in client order and
depends on nothing outside it: each is summed modulo 2^32 (2^64), its masks are taken off, and what
remains is the sum of the clients' differences from the model. No single update is ever bare. Files
stay in the page cache; private memory is a few blocks for each thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import LayoutError, PluginError
from potluck.common.secagg import Header, Lane, Unmasking
from potluck.common.secagg.primitives.masks import lane_dtype
from potluck.common.secagg.vectors.updates import BodyDecoder, HeadSum, decode_head
from potluck.common.tensors.auxiliary import auxiliary_layout
from potluck.common.tensors.flat import FlatVector, TensorBorders, name_at, unflatten
from potluck.common.tensors.large_arrays import empty
from potluck.common.tensors.tensor_drafts import TensorDraft
from potluck.common.tensors.tensor_files import (
    TensorFile,
    Tensors,
    block_is_finite,
    not_finite,
    open_tensors,
)
from potluck.common.updates.masked_lanes import AUXILIARY, BODY, HEAD, LOSS, NORMALIZER, file_layout
from potluck.server.aggregation.apply_round import RoundNumbers
from potluck.server.aggregation.blocks import Result, for_each_block
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
"""Elements summed and unmasked at once: enough that starting the keystreams costs little."""
_READ_ELEMENTS: Final = 2**16
"""Elements of each file added at once, so that the sum stays in a core's cache."""


def check_masked(path: Path, header: Header) -> None:
    """Check that a received file has the lanes of a session. Raises LayoutError, StorageError.

    Its words can't be read, so nothing else is checked.
    """
    try:
        open_tensors(path, expected=file_layout(header.lanes)).close()
    except LayoutError as error:
        raise LayoutError(f"masked update refused: {error.message}", **error.metadata) from None


class MaskedSum:
    """The sum over masked files, unmasked as it is read."""

    def __init__(self, files: Sequence[TensorFile], unmasking: Unmasking) -> None:
        """files: of exactly `unmasking.survivors`, in their order.

        Raises BrokenRuleError (reconstruction) for a sum that so many heads can't have.
        """
        self._files, self._unmasking = files, unmasking
        self.header = unmasking.header
        words = self.words(HEAD, 0, self.header.lane(HEAD).length)
        self.head: HeadSum = decode_head(self.header, unmasking.participants, words, len(files))

    @property
    def normalizer(self) -> float:
        """The mean of what the clients' steps amount to; 1 where that is not asked for."""
        return self.head.metrics.get(NORMALIZER, 1.0)

    def words(self, lane: str, begin: int, end: int) -> NDArray[Any]:
        """Words [begin, end) of a lane's sum, without masks. Thread-safe."""
        total = np.zeros(end - begin, lane_dtype(self.header.lane(lane).modulus_bits))
        for start in range(begin, end, _READ_ELEMENTS):
            stop = min(start + _READ_ELEMENTS, end)
            some = total[start - begin : stop - begin]
            for file in self._files:
                np.add(some, file.arrays[lane][start:stop], out=some)
        self._unmasking.remove(lane, total, begin)
        return total

    def mean(self) -> Callable[[int, int], NDArray[np.float64]]:
        """Reads blocks of the weighted mean difference."""
        return self._reader(self.header.lane(BODY), self.head.weight)

    def sum(self, auxiliary: str) -> Callable[[int, int], NDArray[np.float64]]:
        """Reads blocks of an auxiliary's sum; clients don't weigh it."""
        return self._reader(self.header.lane(f"{AUXILIARY}{auxiliary}"), self.header.weight_bound)

    def _reader(self, lane: Lane, weight: int) -> Callable[[int, int], NDArray[np.float64]]:
        decoder = BodyDecoder(self.header, lane, self._unmasking.participants, weight)
        return lambda begin, end: decoder.decode(self.words(lane.name, begin, end))


@contextmanager
def opened_sum(paths: Sequence[Path], unmasking: Unmasking) -> Iterator[MaskedSum]:
    """Map the survivors' files while the block runs."""
    layout = file_layout(unmasking.header.lanes)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_tensors(path, expected=layout)) for path in paths]
        yield MaskedSum(files, unmasking)


def move_masked(
    strategy: Strategy,
    state: State,
    current: TensorFile,
    total: MaskedSum,
    clients: Sequence[str],
    numbers: RoundNumbers,
    *,
    draft: TensorDraft | None = None,
) -> tuple[Weights, State]:
    """The next model and the strategy's next state, from a masked sum over these clients.

    The strategy sees that many clients that are all alike. draft: as for `apply_round`. Raises
    PluginError where it would weigh them otherwise, NotFiniteError where the result overflows.
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
    return weights, state.apart(current.arrays, combined)


def _alike(
    total: MaskedSum, clients: Sequence[str], buffers: frozenset[str], state: State
) -> UpdateStatistics:
    count, head = len(clients), total.head
    return UpdateStatistics(
        clients=clients,
        samples=np.full(count, max(1, round(head.weight / count)), np.int64),
        steps=np.zeros(count, np.int64),
        normalizers=np.full(count, total.normalizer),
        losses=np.full(count, head.metrics[LOSS]),
        buffers=buffers,
        state=state,
    )


def _check_combine(combine: Combine, clients: int) -> None:
    if combine.reduction is not Reduction.MEAN:
        raise PluginError(f"the strategy wants the {combine.reduction} of masked updates")
    weights = {"": combine.weights, **combine.tensor_weights, **combine.auxiliary}
    for array in weights.values():
        if array.shape != (clients,) or not np.isfinite(array).all() or np.ptp(array) > 1e-12:
            raise PluginError(
                "the strategy weighs clients that are alike otherwise than alike; of masked "
                "updates only the sum is known"
            )


def _factors(
    strategy: Strategy,
    combine: Combine,
    total: MaskedSum,
    current: TensorFile,
    buffers: frozenset[str],
) -> dict[str, float]:
    """By tensor: what its mean difference is multiplied by."""
    normalized = strategy.summation is Summation.NORMALIZED
    factors: dict[str, float] = {}
    for tensor in current.layout.tensors:
        weight = float(combine.tensor_weights.get(tensor.name, combine.weights).sum())
        if not combine.difference and abs(weight - 1.0) > 1e-9:
            raise PluginError(
                f"the strategy's weights sum to {weight:g}; those of weights sum to 1"
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
    """Factor · what is read, where wanted `on_top` of the model; arrays of the model's layout."""
    layout = current.layout
    base, borders = FlatVector(current.arrays, layout), TensorBorders(layout)
    result = Result(layout, draft)

    def one_block(begin: int, end: int) -> None:
        values, out = read(begin, end), result.block(begin, end, result.scratch(end - begin))
        for place, name in borders.parts(begin, end):
            values[place] *= factors[name]
        if on_top:
            for place, piece in base.pieces(begin, end):
                values[place] += piece
        with np.errstate(over="ignore"):
            np.copyto(out, values, casting="same_kind")
        if not block_is_finite(out):
            raise not_finite(name_at(layout, begin + int(np.argmin(np.isfinite(out)))))
        result.put(begin, out)

    for_each_block(layout.parameters, BLOCK_ELEMENTS, lambda: one_block, None)
    return result.arrays({t.name: current.arrays[t.name] for t in layout.tensors if not t.floating})


def _auxiliary(total: MaskedSum, name: str, combine: Combine, current: TensorFile) -> Weights:
    clients = len(combine.weights)
    weight = float(combine.auxiliary.get(name, np.full(clients, 1.0 / clients))[0])
    layout = auxiliary_layout(current.layout)
    found = empty((layout.parameters,), np.float32)
    read = total.sum(name)

    def one_block(begin: int, end: int) -> None:
        np.multiply(read(begin, end), weight, out=found[begin:end], casting="same_kind")

    for_each_block(found.size, BLOCK_ELEMENTS, lambda: one_block, None)
    return unflatten(found, {}, layout)
