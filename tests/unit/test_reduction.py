"""The reduction: exact against plain numpy, the same bits always, memory independent of cohorts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from potluck.common.encoding import EncodedUpdate, Encoding, encode, encoded_layout
from potluck.common.errors import LayoutError, NotFiniteError, PluginError, RunError
from potluck.common.tensors import Layout, TensorFile, open_tensors, write_tensors
from potluck.server.reduction import BLOCK_ELEMENTS, distance, reduce, update_norms
from potluck.server.strategy import Combine, Reduction

Arrays = dict[str, NDArray[Any]]

WIDE = 3 * BLOCK_ELEMENTS + 5
"""Elements of a model of several blocks, none of which ends where a tensor does."""


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


def flat(arrays: Arrays) -> NDArray[np.float32]:
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
    """The definitions, over whole vectors in float64, one client after the other."""
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
def test_it_is_what_plain_numpy_computes(
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
        # Sums of squares and of sorted values are taken in another order; float64 hides nearly all.
        np.testing.assert_allclose(flat(result), expected, rtol=1e-6, atol=1e-9)
        assert (flat(result) != expected).mean() < 1e-4


def test_small_numbers_are_exact(tmp_path: Path) -> None:
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


def test_an_outlier_moves_the_clipped_mean_by_no_more_than_the_clip(tmp_path: Path) -> None:
    vectors = np.array([[0, 0, 0], [3e4, 0, 4e4]], np.float32)
    model = stored(tmp_path / "model", arrays_of(np.zeros(3)))
    updates = files(tmp_path, vectors)
    norms = update_norms(updates, model)
    assert norms.tolist() == [0, 5e4]
    how = Combine(weights=np.array([0.5, 0.5]), reduction=Reduction.CLIPPED_MEAN, clip=10.0)
    for given_norms in (None, norms):
        result = reduce(updates, how, model, norms=given_norms)
        assert flat(result).tolist() == [3, 0, 4]


def test_norms_are_those_of_the_differences(tmp_path: Path) -> None:
    vectors, origin = draw(3, WIDE), draw(1, WIDE, seed=9)[0]
    model = stored(tmp_path / "model", arrays_of(origin))
    updates = files(tmp_path, vectors)
    expected = np.linalg.norm(vectors.astype(np.float64) - origin.astype(np.float64), axis=1)
    norms = update_norms(updates, model, threads=1)
    np.testing.assert_allclose(norms, expected, rtol=1e-13)
    assert norms.tobytes() == update_norms(updates, model, threads=3).tobytes()


@pytest.mark.parametrize("threads", [1, 3])
def test_the_distance_of_two_models_is_their_differences_norm(tmp_path: Path, threads: int) -> None:
    first, second = draw(2, 3 * BLOCK_ELEMENTS + 7)
    one, other = files(tmp_path, [first, second])
    expected = np.linalg.norm((first - second).astype(np.float64))
    assert distance(one, other, threads=threads) == pytest.approx(expected, rel=1e-12)


def test_it_may_go_into_given_memory(tmp_path: Path) -> None:
    updates, how = files(tmp_path, draw(3, 12)), combine(Reduction.MEAN, 3)
    model = updates[0]
    out = np.full(12, np.nan, np.float32)
    result = reduce(updates, how, model, out=out)
    assert flat(result).tobytes() == flat(reduce(updates, how, model)).tobytes()
    assert all(np.may_share_memory(result[name], out) for name in "abc")


@pytest.mark.parametrize(("reduction", "options"), COMBINES)
@pytest.mark.parametrize("encoding", [Encoding.BFLOAT16, Encoding.INT8])
def test_encoded_differences_reduce_to_the_same_bits_as_their_decoded_weights(
    tmp_path: Path, reduction: Reduction, options: dict[str, Any], encoding: Encoding
) -> None:
    generator = np.random.Generator(np.random.PCG64(1))
    origin = draw(1, WIDE, seed=9)[0]
    model = stored(tmp_path / "model", arrays_of(origin))
    layout = encoded_layout(model.layout, encoding)
    updates, decoded = [], []
    for index, change in enumerate(draw(4, WIDE)):
        path = tmp_path / f"encoded{index}"
        arrays = arrays_of(origin + change)
        encoded = encode(arrays, encoding, base=model.arrays, generator=generator)
        write_tensors(path, encoded, layout=layout)
        update = EncodedUpdate(open_tensors(path), model.layout, encoding, model)
        updates.append(update)
        decoded.append(stored(tmp_path / f"decoded{index}", update.decode_to_arrays()))
    how = combine(reduction, 4, **options)
    first, second = reduce(updates, how, model), reduce(decoded, how, model)
    assert flat(first).tobytes() == flat(second).tobytes()
    assert update_norms(updates, model).tobytes() == update_norms(decoded, model).tobytes()


@pytest.mark.parametrize(("reduction", "options"), COMBINES)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    arrival=st.permutations(range(6)),
    threads=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_neither_order_of_arrival_nor_threads_change_a_bit(
    tmp_path: Path,
    reduction: Reduction,
    options: dict[str, Any],
    arrival: list[int],
    threads: int,
    seed: int,
) -> None:
    vectors = draw(6, WIDE, seed)
    model = stored(tmp_path / "model", arrays_of(np.zeros(WIDE)))
    spool: dict[int, TensorFile] = {}
    for client in arrival:
        spool[client] = stored(tmp_path / f"{client}", arrays_of(vectors[client]))
    how = combine(reduction, 6, **options)
    in_client_order = [spool[client] for client in sorted(spool)]
    result = reduce(in_client_order, how, model, threads=threads)
    assert (
        flat(result).tobytes()
        == flat(reduce(files(tmp_path, vectors), how, model, threads=1)).tobytes()
    )


@pytest.mark.parametrize(("reduction", "options"), COMBINES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=40),
    samples=st.lists(st.integers(1, 10**9), min_size=1, max_size=9),
)
def test_identical_clients_are_a_fixed_point(
    tmp_path: Path,
    reduction: Reduction,
    options: dict[str, Any],
    values: list[float],
    samples: list[int],
) -> None:
    vector = np.array(values, np.float32)
    model = stored(tmp_path / "model", arrays_of(vector))
    weights = np.array(samples, np.float64)
    how = Combine(weights=weights / weights.sum(), reduction=reduction, **options)
    result = reduce(files(tmp_path, [vector] * len(samples)), how, model)
    assert (flat(result) == vector).all()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), count=st.integers(1, 8), trim=st.floats(0, 0.49))
def test_median_and_trimmed_mean_do_not_depend_on_who_sent_what(
    tmp_path: Path, data: st.DataObject, count: int, trim: float
) -> None:
    vectors = draw(count, 30, seed=count)
    model = stored(tmp_path / "model", arrays_of(np.zeros(30)))
    shuffled = vectors[data.draw(st.permutations(range(count)))]
    for reduction in (Reduction.MEDIAN, Reduction.TRIMMED_MEAN):
        how = combine(reduction, count, trim=trim)
        first = reduce(files(tmp_path, vectors), how, model)
        second = reduce(files(tmp_path, shuffled), how, model)
        assert flat(first).tobytes() == flat(second).tobytes()


def test_integers_come_from_the_first_client_and_outlive_its_file(tmp_path: Path) -> None:
    updates = [
        stored(tmp_path / f"update{steps}", arrays_of(np.ones(9), steps=steps)) for steps in (7, 8)
    ]
    model = stored(tmp_path / "model", arrays_of(np.zeros(9), steps=1))
    result = reduce(updates, combine(Reduction.MEAN, 2), model)
    with (tmp_path / "update7").open("r+b") as file:
        file.write(bytes(updates[0].layout.file_bytes))
    assert result["steps"].tolist() == [7]
    assert flat(result).tolist() == [1] * 9


def test_a_model_without_parameters_reduces_to_its_integers(tmp_path: Path) -> None:
    update = stored(tmp_path / "update", {"steps": np.array(3)})
    model = stored(tmp_path / "model", {"steps": np.array(1)})
    assert reduce([update], combine(Reduction.MEAN, 1), model)["steps"] == 3
    assert update_norms([update], model).tolist() == [0]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    model = stored(tmp_path / "model", arrays_of(np.zeros(9)))
    updates = files(tmp_path, draw(2, 9))
    with pytest.raises(RunError, match="no update"):
        reduce([], combine(Reduction.MEAN, 0), model)
    with pytest.raises(PluginError, match="weights of shape \\(3,\\) for 2 updates"):
        reduce(updates, combine(Reduction.MEAN, 3), model)
    with pytest.raises(PluginError, match="finite weight"):
        reduce(updates, Combine(weights=np.array([np.nan, 1])), model)
    for trim in (0.5, -0.1, np.nan):
        with pytest.raises(PluginError, match="trim"):
            reduce(updates, combine(Reduction.TRIMMED_MEAN, 2, trim=trim), model)
    for clip in (None, 0.0, -1.0, np.nan, np.inf):
        with pytest.raises(PluginError, match="clip"):
            reduce(updates, combine(Reduction.CLIPPED_MEAN, 2, clip=clip), model)
    with pytest.raises(LayoutError, match="update tensor 'a' has shape 4, the model's has 3"):
        reduce(files(tmp_path, draw(2, 12)), combine(Reduction.MEAN, 2), model)
    # The first of these weights is fine on its own, their sum is not.
    large = files(tmp_path, np.full((2, 9), 3e38))
    with pytest.raises(NotFiniteError, match="tensor 'a' holds NaN or infinity"):
        reduce(large, Combine(weights=np.array([1.0, 1.0])), model)


MEASURE = """
import pathlib, re, sys
import numpy as np
from potluck.common.tensors import open_tensors
from potluck.server.reduction import reduce
from potluck.server.strategy import Combine

def private():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", status)[1]) / 1024

path, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
model = open_tensors(path)
reduce([open_tensors(path)], Combine(weights=np.ones(1)), model, threads=2)
before = private()
updates = [open_tensors(path) for _ in range(count)]
result = reduce(updates, Combine(weights=np.full(count, 1 / count)), model, threads=2)
print(private() - before)
"""


def test_private_memory_is_the_result_and_does_not_grow_with_the_cohort(tmp_path: Path) -> None:
    megabytes = 16
    path = tmp_path / "model"
    stored(path, arrays_of(np.zeros(megabytes * 2**18)))
    grown = []
    for count in (2, 40):
        command = [sys.executable, "-c", MEASURE, str(path), str(count)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        grown.append(float(answer.stdout))
    assert abs(grown[0] - grown[1]) < 2
    assert grown[1] < megabytes + 12  # the result, and a few blocks for each of two threads
