"""The reduction: combines a round's updates into one, block by block.

Each block of the floating-point vector (`potluck.common.tensors.flat`) is read from every update in
client order and combined in float64, then rounded to float32 once. Blocks are independent, so the
result has the same bits for any order of arrival and any assignment of blocks to threads. Results
are written to a file block by block, so each thread needs only a few blocks of private memory. A
reduction that sorts needs one block of every update per thread, usually at most 8 MiB together.

Tensors that are not floating-point are taken from the first update in client order; they are never
averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import PluginError
from potluck.common.tensors.encoding import EncodedUpdate
from potluck.common.tensors.flat import FlatVector, TensorBorders, name_at
from potluck.common.tensors.layout import Layout, quoted
from potluck.common.tensors.tensor_drafts import TensorDraft
from potluck.common.tensors.tensor_files import Tensors, block_is_finite, not_finite
from potluck.server.reduce.blocks import Result, for_each_block
from potluck.server.reduce.update_files import Update, decoders_of
from potluck.server.reduce.update_norms import update_norms
from potluck.server.strategy import Combine, Reduction

# Sorting networks ---------------------------------------------------------------------------------
# A sorting network is the fastest way to sort a few values for each of millions of coordinates:
# numpy's minimum and maximum do each comparison for a whole block of coordinates at once.


class Comparison(NamedTuple):
    """Puts the smaller of values `low` and `high` into `low` and the larger into `high`.

    `keeps_low` or `keeps_high` is False if that value is not used again.
    """

    low: int
    high: int
    keeps_low: bool
    keeps_high: bool


@lru_cache(maxsize=32)
def selection_network(values: int, begin: int, end: int) -> tuple[Comparison, ...]:
    """Return comparisons that put the values of ranks [begin, end) into positions [begin, end)."""
    wanted = set(range(begin, end))
    kept: list[Comparison] = []
    for low, high in reversed(_merge_exchange(values)):
        if low in wanted or high in wanted:
            kept.append(Comparison(low, high, low in wanted, high in wanted))
            wanted |= {low, high}
    return tuple(reversed(kept))


def _merge_exchange(values: int) -> list[tuple[int, int]]:
    """Return the pairs that Batcher's merge exchange compares (Knuth, TAOCP 3, 5.2.2, Algorithm
    M)."""
    pairs: list[tuple[int, int]] = []
    top = 1 << max(values - 1, 0).bit_length() >> 1
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(values - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return pairs


# The reduction ------------------------------------------------------------------------------------

_SUMMED_BLOCK_ELEMENTS: Final = 2**16
"""Number of elements per block of a sum: two float64 blocks, the sum and a term, fit a core's L2
cache (1 MiB)."""
_SORTED_BLOCK_ELEMENTS: Final = 2**17
_SORTED_ELEMENTS: Final = 2**21
_SORTING: Final = (Reduction.MEDIAN, Reduction.TRIMMED_MEAN, Reduction.NEAR_MEDIAN)
_Combiner = Callable[[int, int, NDArray[np.float32]], None]


def reduce(
    updates: Sequence[Update],
    combine: Combine,
    model: Tensors,
    *,
    norms: NDArray[np.float64] | None = None,
    threads: int | None = None,
    draft: TensorDraft | None = None,
) -> Mapping[str, NDArray[Any]]:
    """Combine the updates, in client order, into arrays of the model's layout.

    `norms`: the result of `update_norms`, if it was called; only the clipped mean needs them.
    `threads`: by default one for each processor this process may use, at most 4. `draft`: the file
    that the result is written to, and mapped from; without one it is in memory. Raises LayoutError
    if an update does not fit the model, PluginError if `combine` is invalid, NotFiniteError if the
    result overflows, StorageError if the disk fails.
    """
    decoders = decoders_of(updates, model.layout)
    _check_combine(combine, len(decoders), model.layout)
    factors = combine.weights
    if combine.reduction is Reduction.CLIPPED_MEAN:
        if norms is None:
            norms = update_norms(updates, model, threads=threads)
        factors = factors * clip_scales(norms, combine.clip)
    block = _SUMMED_BLOCK_ELEMENTS
    if combine.reduction in _SORTING:
        # At most 8 MiB for each thread, unless there are more than 8,192 updates.
        block = min(_SORTED_BLOCK_ELEMENTS, max(256, _SORTED_ELEMENTS // len(decoders)))
    result = Result(model.layout, draft)

    def combiner() -> Callable[[int, int], None]:
        combined = _combiner(decoders, combine, factors, model, block)
        scratch = result.scratch(block)

        def one_block(begin: int, end: int) -> None:
            out = result.block(begin, end, scratch)
            with np.errstate(over="ignore", invalid="ignore"):
                combined(begin, end, out)
            if not block_is_finite(out):
                position = begin + int(np.argmin(np.isfinite(out)))
                raise not_finite(name_at(model.layout, position))
            result.put(begin, out)

        return one_block

    for_each_block(model.layout.parameters, block, combiner, threads)
    return result.arrays(decoders[0].carried)


def clip_scales(norms: NDArray[np.float64], clip: float | None) -> NDArray[np.float64]:
    """Return the factors that scale differences with these norms down to at most the norm
    `clip`."""
    if clip is None or not 0 < clip < math.inf:
        raise PluginError(f"the strategy's clip is {clip}; it must be above 0 and finite")
    return clip / np.maximum(norms, clip)


def _check_combine(combine: Combine, updates: int, layout: Layout) -> None:
    weights = {"": combine.weights, **combine.tensor_weights}
    for tensor, array in weights.items():
        if array.shape != (updates,) or not np.isfinite(array).all():
            where = f" for tensor {quoted(tensor)}" if tensor else ""
            raise PluginError(
                f"the strategy gave weights of shape {array.shape}{where} for {updates} updates; "
                "it must give one finite weight for each"
            )
    for tensor in combine.tensor_weights:
        if tensor not in layout.by_name or not layout.by_name[tensor].floating:
            raise PluginError(
                f"the strategy sets weights for tensor {quoted(tensor)}, which is not one of the "
                "model's floating-point tensors"
            )
    if (combine.difference or combine.tensor_weights) and combine.reduction is not Reduction.MEAN:
        raise PluginError(
            f"the strategy requests the {combine.reduction} with `difference` or with weights "
            "per tensor, which only a mean supports"
        )
    if combine.reduction is Reduction.TRIMMED_MEAN and not 0 <= combine.trim < 0.5:
        raise PluginError(f"the strategy's trim is {combine.trim}; it must be in [0, 0.5)")
    used = np.count_nonzero(combine.weights)
    if combine.reduction is Reduction.NEAR_MEDIAN and not 1 <= combine.nearest <= used:
        raise PluginError(
            f"the strategy's number of values near the median is {combine.nearest}; it must be in "
            f"[1, {used}]"
        )


def _combiner(
    decoders: list[EncodedUpdate],
    combine: Combine,
    factors: NDArray[np.float64],
    model: Tensors,
    block: int,
) -> _Combiner:
    """Return a function that combines blocks into `out`; each thread needs its own."""
    clipped = combine.reduction is Reduction.CLIPPED_MEAN
    match combine.reduction:
        case Reduction.MEAN | Reduction.CLIPPED_MEAN:
            base = FlatVector(model.arrays, model.layout) if clipped or combine.difference else None
            scales = _Scales(factors, combine.tensor_weights, model.layout)
            return _sum(decoders, scales, base, block, on_top=clipped)
        case Reduction.MEDIAN:
            return _middle(decoders, (len(decoders) - 1) // 2, block)
        case Reduction.TRIMMED_MEAN:
            # 0.29 · 100 is slightly below 29 in floating point, and must give 29.
            return _middle(decoders, math.floor(combine.trim * len(decoders) + 1e-9), block)
        case Reduction.NEAR_MEDIAN:
            used = [decoders[place] for place in np.flatnonzero(combine.weights)]
            return _near_median(used, combine.nearest, block)


class _Scales:
    """Factors by which elements of each update are multiplied: one per update, or one per update
    and tensor."""

    def __init__(
        self,
        factors: NDArray[np.float64],
        tensor_factors: Mapping[str, NDArray[np.float64]],
        layout: Layout,
    ) -> None:
        self._factors: list[float] = factors.tolist()
        self._borders = TensorBorders(layout) if tensor_factors else None
        self._by_tensor: dict[str, list[float]] = {
            name: array.tolist() for name, array in tensor_factors.items()
        }

    def of(self, begin: int, end: int) -> list[tuple[slice, list[float]]]:
        """Split block [begin, end) into slices, and return each with its factors, one per
        update."""
        if self._borders is None:
            return [(slice(0, end - begin), self._factors)]
        return [
            (place, self._by_tensor.get(name, self._factors))
            for place, name in self._borders.parts(begin, end)
        ]


def _sum(
    decoders: list[EncodedUpdate],
    scales: _Scales,
    base: FlatVector | None,
    block: int,
    *,
    on_top: bool,
) -> _Combiner:
    """Return a combiner for Σ scale · update. With a base: for Σ scale · (update − base), added to
    the base if `on_top`."""
    scratch = np.empty(block, np.float32)
    origins, sums, product = np.empty(block), np.empty(block), np.empty(block)

    def combined(begin: int, end: int, out: NDArray[np.float32]) -> None:
        origin, total, work = origins[: out.size], sums[: out.size], product[: out.size]
        if base is not None:
            np.copyto(origin, base.block(begin, end, scratch))
        parts = scales.of(begin, end)
        total.fill(0)
        for index, decoder in enumerate(decoders):
            # Converting first is faster than a product of mixed types, which numpy buffers.
            np.copyto(work, decoder.block(begin, end, scratch))
            if base is not None:
                np.subtract(work, origin, out=work)
            for place, factors in parts:
                np.multiply(work[place], factors[index], out=work[place])
            np.add(total, work, out=total)
        if on_top:
            np.add(total, origin, out=total)
        np.copyto(out, total, casting="same_kind")

    return combined


def _middle(decoders: list[EncodedUpdate], trimmed: int, block: int) -> _Combiner:
    """Return a combiner for the mean of each coordinate without its `trimmed` smallest and largest
    values.

    For the median, one value remains, or two if the number of updates is even.
    """
    kept = range(trimmed, len(decoders) - trimmed)
    sort = _Sorter(decoders, kept, block)
    sums = np.empty(block)

    def combined(begin: int, end: int, out: NDArray[np.float32]) -> None:
        values = sort(begin, end)
        total = sums[: out.size]
        # Adding to 0 also turns −0 into 0, so the result has the same bits everywhere.
        total.fill(0)
        for index in kept:
            np.add(total, values[index], out=total)
        np.divide(total, len(kept), out=total)
        np.copyto(out, total, casting="same_kind")

    return combined


def _near_median(decoders: list[EncodedUpdate], nearest: int, block: int) -> _Combiner:
    """Return a combiner for the mean of the `nearest` values around each coordinate's median.

    These values are consecutive in ascending order. The value just before them is farther from the
    median than their last value.
    """
    count = len(decoders)
    sort = _Sorter(decoders, range(count), block)
    sums = np.empty(block)

    def combined(begin: int, end: int, out: NDArray[np.float32]) -> None:
        values = sort(begin, end)
        median = values[(count - 1) // 2].astype(np.float64)
        first = np.zeros(out.size, np.int64)
        for index in range(count - nearest):
            first += median - values[index] > values[index + nearest] - median
        total = sums[: out.size]
        total.fill(0)
        for index in range(count):
            used = (first <= index) & (index < first + nearest)
            np.add(total, values[index], out=total, where=used)
        np.divide(total, nearest, out=total)
        np.copyto(out, total, casting="same_kind")

    return combined


class _Sorter:
    """Reads a block of each update, and sorts the values of each coordinate."""

    def __init__(self, decoders: list[EncodedUpdate], wanted: range, block: int) -> None:
        """wanted: ranks whose values are needed; the smallest value has rank 0."""
        self._decoders = decoders
        self._network = selection_network(len(decoders), wanted.start, wanted.stop)
        self._rows = [np.empty(block, np.float32) for _ in decoders]
        self._spare = np.empty(block, np.float32)

    def __call__(self, begin: int, end: int) -> list[NDArray[np.float32]]:
        """Return one row for each rank; only the rows of wanted ranks hold the values of their
        rank."""
        size = end - begin
        values, spare = [row[:size] for row in self._rows], self._spare[:size]
        for value, decoder in zip(values, self._decoders, strict=True):
            decoder.read(begin, end, value)
        for low, high, keeps_low, keeps_high in self._network:
            first, second = values[low], values[high]
            if keeps_low:
                np.minimum(first, second, out=spare)
            if keeps_high:
                np.maximum(first, second, out=second)
            if keeps_low:
                values[low], spare = spare, first
        return values
