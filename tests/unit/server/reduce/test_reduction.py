"""The reduction equals plain numpy, always gives the same bits, and bounds its memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from potluck.common.interruptible import in_thread
from potluck.common.tensors.tensor_drafts import drafted
from potluck.common.tensors.tensor_files import Layout, TensorFile, open_tensors, write_tensors
from potluck.server.reduce.blocks import BLOCK_ELEMENTS, for_each_block
from potluck.server.reduce.reduction import reduce
from potluck.server.reduce.update_norms import distance, update_norms
from potluck.server.strategy import Combine, Reduction

Arrays = dict[str, NDArray[Any]]

WIDE = 3 * BLOCK_ELEMENTS + 5
"""Number of elements in a model of several blocks, none of which ends where a tensor ends."""


def arrays_of(vector: NDArray[Any], steps: int = 0) -> Arrays:
    vector = vector.astype(np.float32)
    third = vector.size // 3
    return {
        "a": vector[:third],
        "steps": np.array([steps], np.int64),
        "b": vector[third : 2 * third].reshape(-1, 1),
        "c": vector[2 * third :],
    }


def stored(path: Path, arrays: Arrays) -> TensorFile:
    write_tensors(path, arrays)
    return open_tensors(path)


def files(folder: Path, vectors: Iterable[NDArray[Any]]) -> list[TensorFile]:
    return [
        stored(folder / f"update{index}", arrays_of(vector, steps=index))
        for index, vector in enumerate(vectors)
    ]


def draw(count: int, size: int, seed: int = 0) -> NDArray[np.float32]:
    generator = np.random.Generator(np.random.PCG64(seed))
    return generator.standard_normal((count, size)).astype(np.float32)


def flat(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    joined: NDArray[np.float32] = np.concatenate([arrays[name].reshape(-1) for name in "abc"])
    return joined


def combine(reduction: Reduction, count: int, **options: Any) -> Combine:
    weights = np.arange(1, count + 1, dtype=np.float64)
    return Combine(weights=weights / weights.sum(), reduction=reduction, **options)


COMBINES = [
    (Reduction.MEAN, {}),
    (Reduction.MEDIAN, {}),
    (Reduction.TRIMMED_MEAN, {"trim": 0.3}),
    (Reduction.CLIPPED_MEAN, {"clip": 200.0}),
]


def straightforward(
    vectors: NDArray[np.float32], model: NDArray[np.float32], how: Combine
) -> NDArray[np.float32]:
    """Return the reduction by its definition: whole vectors in float64, client after client."""
    x, origin = vectors.astype(np.float64), model.astype(np.float64)
    result = np.zeros_like(origin)
    match how.reduction:
        case Reduction.MEAN:
            for weight, row in zip(how.weights, x, strict=True):
                result += weight * row
        case Reduction.MEDIAN:
            result += np.median(x, axis=0)
        case Reduction.TRIMMED_MEAN:
            cut = int(how.trim * len(x))
            result += np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)
        case Reduction.CLIPPED_MEAN:
            scales = np.minimum(1, (how.clip or 0) / np.linalg.norm(x - origin, axis=1))
            for weight, row in zip(how.weights * scales, x, strict=True):
                result += weight * (row - origin)
            result += origin
    return result.astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 5, 10])
@pytest.mark.parametrize(("reduction", "options"), COMBINES)
def test_reduction_equals_plain_numpy(
    tmp_path: Path, reduction: Reduction, options: dict[str, Any], count: int
) -> None:
    vectors, origin = draw(count, WIDE), draw(1, WIDE, seed=9)[0]
    model = stored(tmp_path / "model", arrays_of(origin))
    how = combine(reduction, count, **options)
    result = reduce(files(tmp_path, vectors), how, model)
    assert Layout.of(result) == model.layout
    assert list(result) == list(model.arrays)
    expected = straightforward(vectors, origin, how)
    if reduction in (Reduction.MEAN, Reduction.MEDIAN):
        assert (flat(result) == expected).all()
    else:
        # Squares and sorted values are summed in another order, so a few values may round
        # differently.
        np.testing.assert_allclose(flat(result), expected, rtol=1e-6, atol=1e-9)
        assert (flat(result) != expected).mean() < 1e-4


def test_reductions_of_small_vectors_equal_values_computed_by_hand(tmp_path: Path) -> None:
    vectors = np.array([[1, -4, 1e8], [3, 0, 1], [5, 2, -1e8], [100, 2, 1]], np.float32)
    model = stored(tmp_path / "model", arrays_of(np.zeros(3)))
    updates = files(tmp_path, vectors)

    def reduced(reduction: Reduction, **options: Any) -> list[float]:
        how = Combine(weights=np.full(4, 0.25), reduction=reduction, **options)
        result: list[float] = flat(reduce(updates, how, model)).tolist()
        return result

    assert reduced(Reduction.MEAN) == [27.25, 0, 0.5]
    assert reduced(Reduction.MEDIAN) == [4, 1, 1]
    assert reduced(Reduction.TRIMMED_MEAN, trim=0.25) == [4, 1, 1]
    assert reduced(Reduction.TRIMMED_MEAN, trim=0.0) == [27.25, 0, 0.5]


def test_outlier_changes_the_clipped_mean_by_at_most_the_clip(tmp_path: Path) -> None:
    vectors = np.array([[0, 0, 0], [3e4, 0, 4e4]], np.float32)
    model = stored(tmp_path / "model", arrays_of(np.zeros(3)))
    updates = files(tmp_path, vectors)
    norms = update_norms(updates, model)
    assert norms.tolist() == [0, 5e4]
    how = Combine(weights=np.array([0.5, 0.5]), reduction=Reduction.CLIPPED_MEAN, clip=10.0)
    for given_norms in (None, norms):
        result = reduce(updates, how, model, norms=given_norms)
        assert flat(result).tolist() == [3, 0, 4]


def test_update_norms_are_norms_of_the_differences_from_the_model(tmp_path: Path) -> None:
    vectors, origin = draw(3, WIDE), draw(1, WIDE, seed=9)[0]
    model = stored(tmp_path / "model", arrays_of(origin))
    updates = files(tmp_path, vectors)
    expected = np.linalg.norm(vectors.astype(np.float64) - origin.astype(np.float64), axis=1)
    norms = update_norms(updates, model, threads=1)
    np.testing.assert_allclose(norms, expected, rtol=1e-13)
    assert norms.tobytes() == update_norms(updates, model, threads=3).tobytes()


@pytest.mark.parametrize("threads", [1, 3])
def test_distance_between_two_models_is_the_norm_of_their_difference(
    tmp_path: Path, threads: int
) -> None:
    first, second = draw(2, 3 * BLOCK_ELEMENTS + 7)
    one, other = files(tmp_path, [first, second])
    expected = np.linalg.norm((first - second).astype(np.float64))
    assert distance(one, other, threads=threads) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("threads", [1, 3])
def test_reduction_written_to_a_file_block_by_block_equals_that_in_memory(
    tmp_path: Path, threads: int
) -> None:
    updates = files(tmp_path, draw(3, 2 * BLOCK_ELEMENTS + 5))
    how, model = combine(Reduction.MEAN, 3), updates[0]
    expected = reduce(updates, how, model)
    with drafted(tmp_path / "reduced", model.layout) as draft:
        result = reduce(updates, how, model, draft=draft, threads=threads)
        assert flat(result).tobytes() == flat(expected).tobytes()
        assert draft.holds(result)
        digest = draft.finish()
    assert digest == write_tensors(tmp_path / "expected", expected, layout=model.layout)


async def test_cancelled_reduction_ends_after_the_current_block(tmp_path: Path) -> None:
    begun, blocks = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def combiner() -> Callable[[int, int], None]:
        def one_block(begin: int, _: int) -> None:
            blocks.append(begin)
            loop.call_soon_threadsafe(begun.set)

        return one_block

    ended = asyncio.Event()

    def work() -> None:
        try:
            for_each_block(2**62, 1, combiner, 2)
        finally:
            loop.call_soon_threadsafe(ended.set)

    task = asyncio.create_task(in_thread(work))
    await begun.wait()
    task.cancel()
    async with asyncio.timeout(60):
        await ended.wait()


MEASURE = """
import pathlib, re, sys
import numpy as np
from potluck.common.tensors.tensor_drafts import drafted
from potluck.common.tensors.tensor_files import open_tensors
from potluck.server.reduce.reduction import reduce
from potluck.server.strategy import Combine

def private():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", status)[1]) / 1024

path, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
model = open_tensors(path)
reduce([open_tensors(path)], Combine(weights=np.ones(1)), model, threads=2)
before = private()
updates = [open_tensors(path) for _ in range(count)]
with drafted(path.with_name(f"{count}"), model.layout) as draft:
    reduce(updates, Combine(weights=np.full(count, 1 / count)), model, threads=2, draft=draft)
    draft.finish()
    print(private() - before)
"""


def test_reduction_memory_is_independent_of_model_size_and_cohort_size(tmp_path: Path) -> None:
    megabytes = 64
    path = tmp_path / "model"
    stored(path, arrays_of(np.zeros(megabytes * 2**18)))
    grown = []
    for count in (2, 40):
        command = [sys.executable, "-c", MEASURE, str(path), str(count)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        grown.append(float(answer.stdout))
    assert max(grown) < 16  # MiB: a few blocks for each of two threads
