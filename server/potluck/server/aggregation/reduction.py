"""The reduction: a round's updates become one, block by block across their files.

Each block of the floating-point vector (`potluck.common.tensors.flat`) is read from every update in
client order and combined in float64, then rounded to float32 once. A block depends on nothing
outside it, so the result has the same bits whatever order updates arrived in and whatever thread
takes which block. Updates stay in the page cache, and the result is written to a file as it is
made: private memory is a few blocks for each thread (for median and trimmed mean one block of every
update, at most 8 MiB in all).

Tensors that are not floating-point are taken from the first update in client order, never
averaged.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import PluginError, RunError
from potluck.common.interruptible import interruption
from potluck.common.tensors.encoding import EncodedUpdate
from potluck.common.tensors.flat import FlatVector, TensorBorders, name_at, unflatten
from potluck.common.tensors.layout import Layout, quoted
from potluck.common.tensors.tensor_drafts import TensorDraft
from potluck.common.tensors.tensor_files import TensorFile, Tensors, block_is_finite, not_finite
from potluck.server.aggregation.sorting_network import selection_network
from potluck.server.strategy import Combine, Reduction

BLOCK_ELEMENTS: Final = 2**18
"""Elements combined at once, 28 bytes each.

More than a core's cache holds, and a single thread would rather have fewer. But each step on a
block ends with a wait for the interpreter's lock: where steps are short, four threads wait more
than they work.
"""

_SORTED_BLOCK_ELEMENTS: Final = 2**17
_SORTED_ELEMENTS: Final = 2**21
_MAXIMUM_THREADS: Final = 4

Update = EncodedUpdate | TensorFile
"""An update as it lies in the spool; a plain file holds whole float32 weights."""

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
    """The updates, in client order, combined into arrays of the model's layout.

    `norms`: what `update_norms` said, if it was asked; only the clipped mean needs them.
    `threads`: by default one for each processor this process may use, at most 4. `draft`: the file
    that the result is written to, and mapped from; without one it is in memory. Raises LayoutError
    if an update does not fit the model, PluginError if `combine` makes no sense, NotFiniteError if
    the result overflows, StorageError if the disk refuses.
    """
    decoders = _decoders(updates, model.layout)
    _check_combine(combine, len(decoders), model.layout)
    factors = combine.weights
    if combine.reduction is Reduction.CLIPPED_MEAN:
        if norms is None:
            norms = update_norms(updates, model, threads=threads)
        factors = factors * clip_scales(norms, combine.clip)
    block = BLOCK_ELEMENTS
    if combine.reduction in (Reduction.MEDIAN, Reduction.TRIMMED_MEAN):
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


class Result:
    """Where the blocks of a model that is being made go: to a draft, or else to memory."""

    def __init__(self, layout: Layout, draft: TensorDraft | None) -> None:
        self._layout = layout
        self._draft = draft
        self._vector = np.empty(0 if draft else layout.parameters, np.float32)

    def scratch(self, elements: int) -> NDArray[np.float32]:
        """What a thread needs for its blocks of at most so many elements."""
        return np.empty(elements if self._draft else 0, np.float32)

    def block(self, begin: int, end: int, scratch: NDArray[np.float32]) -> NDArray[np.float32]:
        """Where to make elements [begin, end) of the floating-point vector."""
        return self._vector[begin:end] if self._draft is None else scratch[: end - begin]

    def put(self, begin: int, block: NDArray[np.float32]) -> None:
        """A block is made."""
        if self._draft is not None:
            self._draft.put_flat(begin, block)

    def arrays(self, carried: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """The whole, once all blocks are made. carried: the tensors of other types; copied."""
        if self._draft is None:
            copies = {name: array.copy() for name, array in carried.items()}
            return unflatten(self._vector, copies, self._layout)
        for name, array in carried.items():
            self._draft.put(name, 0, array)
        return self._draft.arrays


def update_norms(
    updates: Sequence[Update], model: Tensors, *, threads: int | None = None
) -> NDArray[np.float64]:
    """The statistics pass: each update's L2 norm of update − model, summed in float64.

    Over all floating-point tensors; one value for each update, in client order. Raises
    LayoutError if an update does not fit the model.
    """
    decoders = _decoders(updates, model.layout)
    base = FlatVector(model.arrays, model.layout)
    blocks = -(-len(base) // BLOCK_ELEMENTS)
    squares = np.zeros((len(decoders), blocks))

    def combiner() -> Callable[[int, int], None]:
        scratch = np.empty(BLOCK_ELEMENTS, np.float32)
        origin = np.empty(BLOCK_ELEMENTS)
        difference = np.empty(BLOCK_ELEMENTS)

        def one_block(begin: int, end: int) -> None:
            size = end - begin
            np.copyto(origin[:size], base.block(begin, end, scratch))
            work = difference[:size]
            for index, decoder in enumerate(decoders):
                np.copyto(work, decoder.block(begin, end, scratch))
                np.subtract(work, origin[:size], out=work)
                np.multiply(work, work, out=work)
                squares[index, begin // BLOCK_ELEMENTS] = work.sum()

        return one_block

    for_each_block(len(base), BLOCK_ELEMENTS, combiner, threads)
    norms: NDArray[np.float64] = np.sqrt(squares.sum(axis=1))
    return norms


def distance(first: Tensors, second: Tensors, *, threads: int | None = None) -> float:
    """The Euclidean distance of two models' floating-point tensors, summed in float64."""
    one, other = FlatVector(first.arrays, first.layout), FlatVector(second.arrays, first.layout)
    squares = np.zeros(-(-len(one) // BLOCK_ELEMENTS))

    def combiner() -> Callable[[int, int], None]:
        scratches = np.empty((3, BLOCK_ELEMENTS), np.float32)
        difference = np.empty(BLOCK_ELEMENTS)

        def one_block(begin: int, end: int) -> None:
            work, step = difference[: end - begin], scratches[2, : end - begin]
            blocks = one.block(begin, end, scratches[0]), other.block(begin, end, scratches[1])
            np.subtract(*blocks, out=step)
            np.copyto(work, step)
            np.multiply(work, work, out=work)
            squares[begin // BLOCK_ELEMENTS] = work.sum()

        return one_block

    for_each_block(len(one), BLOCK_ELEMENTS, combiner, threads)
    return math.sqrt(squares.sum())


def tensor_norms(
    updates: Sequence[Update], model: Tensors, *, threads: int | None = None
) -> dict[str, NDArray[np.float64]]:
    """As `update_norms`, but of each floating-point tensor by itself, by its name."""
    decoders = _decoders(updates, model.layout)
    base = FlatVector(model.arrays, model.layout)
    borders = TensorBorders(model.layout)
    blocks = -(-len(base) // BLOCK_ELEMENTS)
    found: list[list[tuple[str, NDArray[np.float64]]]] = [[] for _ in range(blocks)]

    def combiner() -> Callable[[int, int], None]:
        scratch = np.empty(BLOCK_ELEMENTS, np.float32)
        origin = np.empty(BLOCK_ELEMENTS)
        difference = np.empty(BLOCK_ELEMENTS)

        def one_block(begin: int, end: int) -> None:
            size = end - begin
            np.copyto(origin[:size], base.block(begin, end, scratch))
            parts = [(place, n, np.empty(len(decoders))) for place, n in borders.parts(begin, end)]
            work = difference[:size]
            for index, decoder in enumerate(decoders):
                np.copyto(work, decoder.block(begin, end, scratch))
                np.subtract(work, origin[:size], out=work)
                np.multiply(work, work, out=work)
                for place, _, squares in parts:
                    squares[index] = work[place].sum()
            found[begin // BLOCK_ELEMENTS] = [(name, squares) for _, name, squares in parts]

        return one_block

    for_each_block(len(base), BLOCK_ELEMENTS, combiner, threads)
    totals = {t.name: np.zeros(len(decoders)) for t in model.layout.tensors if t.floating}
    for block in found:  # in their order, whichever thread took which
        for name, squares in block:
            totals[name] += squares
    return {name: np.sqrt(total) for name, total in totals.items()}


def clip_scales(norms: NDArray[np.float64], clip: float | None) -> NDArray[np.float64]:
    """What to multiply differences of these norms by so that none is longer than `clip`."""
    if clip is None or not 0 < clip < math.inf:
        raise PluginError(f"the strategy's clip is {clip}; it must be above 0 and finite")
    return clip / np.maximum(norms, clip)


def _decoders(updates: Sequence[Update], layout: Layout) -> list[EncodedUpdate]:
    if not updates:
        raise RunError("there is no update to reduce; wait for at least one client")
    decoders = [u if isinstance(u, EncodedUpdate) else EncodedUpdate(u, layout) for u in updates]
    for decoder in decoders:
        if decoder.layout != layout:
            decoder.layout.check_matches(layout)
            raise RunError("an update was opened with another order of tensors than the model's")
    return decoders


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
                f"the strategy weighs tensor {quoted(tensor)}, which is none of the model's "
                "floating-point tensors"
            )
    if (combine.difference or combine.tensor_weights) and combine.reduction is not Reduction.MEAN:
        raise PluginError(
            f"the strategy wants the {combine.reduction} of differences or by tensor; only a mean "
            "can be had so"
        )
    if combine.reduction is Reduction.TRIMMED_MEAN and not 0 <= combine.trim < 0.5:
        raise PluginError(f"the strategy's trim is {combine.trim}; it must be in [0, 0.5)")


def for_each_block(
    size: int,
    block: int,
    combiner: Callable[[], Callable[[int, int], None]],
    threads: int | None,
) -> None:
    """Call a thread's own `combiner()` with (begin, end) for every block of [0, size)."""
    # `next` of a range's iterator is one step of the interpreter: no block is taken twice.
    begins = iter(range(0, size, block))
    check = interruption()

    def work() -> None:
        one_block = combiner()
        for begin in begins:
            check()
            one_block(begin, min(begin + block, size))

    if threads is None:
        threads = min(_available_processors(), _MAXIMUM_THREADS)
    threads = max(1, min(threads, -(-size // block)))
    with ThreadPoolExecutor(threads, thread_name_prefix="reduce") as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()


def _available_processors() -> int:
    if hasattr(os, "sched_getaffinity"):  # it knows of containers' processor sets; not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _combiner(
    decoders: list[EncodedUpdate],
    combine: Combine,
    factors: NDArray[np.float64],
    model: Tensors,
    block: int,
) -> _Combiner:
    """What combines one block after another into `out`; not to be shared among threads."""
    clipped = combine.reduction is Reduction.CLIPPED_MEAN
    match combine.reduction:
        case Reduction.MEAN | Reduction.CLIPPED_MEAN:
            base = FlatVector(model.arrays, model.layout) if clipped or combine.difference else None
            scales = _Scales(factors, combine.tensor_weights, model.layout)
            return _sum(decoders, scales, base, block, on_top=clipped)
        case Reduction.MEDIAN:
            return _middle(decoders, (len(decoders) - 1) // 2, block)
        case Reduction.TRIMMED_MEAN:
            # 0.29 · 100 is a little below 29 in binary; it means 29.
            return _middle(decoders, math.floor(combine.trim * len(decoders) + 1e-9), block)


class _Scales:
    """What each update's elements are multiplied by: one number, or one for each tensor."""

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
        """The parts of a block and, for each, a number for every update."""
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
    """Σ scale · update; with a base Σ scale · (update − base), or that `on_top` of the base."""
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
    """The mean of each coordinate's values without the `trimmed` smallest and largest.

    The median is the case that leaves one value, or two of an even number.
    """
    kept = range(trimmed, len(decoders) - trimmed)
    network = selection_network(len(decoders), kept.start, kept.stop)
    rows = [np.empty(block, np.float32) for _ in decoders]
    spare_row, sums = np.empty(block, np.float32), np.empty(block)

    def combined(begin: int, end: int, out: NDArray[np.float32]) -> None:
        values, spare = [row[: out.size] for row in rows], spare_row[: out.size]
        for value, decoder in zip(values, decoders, strict=True):
            decoder.read(begin, end, value)
        for low, high, keeps_low, keeps_high in network:
            first, second = values[low], values[high]
            if keeps_low:
                np.minimum(first, second, out=spare)
            if keeps_high:
                np.maximum(first, second, out=second)
            if keeps_low:
                values[low], spare = spare, first
        total = sums[: out.size]
        # Beginning at 0 also makes −0, which compares equal to 0, the same everywhere.
        total.fill(0)
        for index in kept:
            np.add(total, values[index], out=total)
        np.divide(total, len(kept), out=total)
        np.copyto(out, total, casting="same_kind")

    return combined
