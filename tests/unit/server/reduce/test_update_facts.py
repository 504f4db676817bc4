"""Facts of updates against plain numpy, over blocks and threads, and in every encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from potluck.common.errors import RunError
from potluck.common.tensors.encoding import EncodedUpdate
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import NamedTensors
from potluck.server.reduce import update_facts
from potluck.server.reduce.update_facts import read_facts
from potluck.server.selection import SKETCH_SIZE, UpdateFact

GRAM, SKETCH, MOVE = UpdateFact.GRAM, UpdateFact.SKETCH, UpdateFact.OUTPUT_MOVE
NORM = UpdateFact.NORM
Arrays = dict[str, NDArray[Any]]


def arrays(generator: np.random.Generator, *, bias: bool = True) -> Arrays:
    made: Arrays = {
        "body.weight": generator.normal(size=(700, 9)),
        "norm.running_mean": 100 * generator.normal(size=9),
        "head.weight": generator.normal(size=(4, 9)),
    }
    if bias:
        made["head.bias"] = generator.normal(size=4)
    made = {name: array.astype(np.float32) for name, array in made.items()}
    return made | {"norm.batches": np.array(3)}


def tensors(named: Arrays) -> NamedTensors:
    layout = Layout.of(named)
    return NamedTensors(layout=layout, arrays={t.name: named[t.name] for t in layout.tensors})


def read(wanted: set[UpdateFact], *, updates: int = 5, bias: bool = True, **options: Any) -> Any:
    generator = np.random.default_rng(4)
    base = tensors(arrays(generator, bias=bias))
    sent = [tensors(arrays(generator, bias=bias)) for _ in range(updates)]
    encoded = [EncodedUpdate(each, base.layout) for each in sent]
    buffers = {"norm.running_mean"}
    given = {"seed": 7, "buffers": buffers, "classes": 4, **options}
    names = [t.name for t in base.layout.tensors if t.floating and t.name not in buffers]
    differences = np.array(
        [
            np.concatenate(
                [
                    (each.arrays[name].astype(np.float64) - base.arrays[name]).reshape(-1)
                    for name in names
                ]
            )
            for each in sent
        ]
    )
    moves = np.array([each.arrays["head.weight"] - base.arrays["head.weight"] for each in sent])
    return read_facts(wanted, encoded, base, **given), differences, (base, sent, moves)


def test_gram_matrix_is_that_of_the_parameter_differences() -> None:
    found, differences, _ = read({GRAM})
    assert list(found) == ["gram"]
    np.testing.assert_allclose(found["gram"], differences @ differences.T, rtol=1e-12)


def test_update_norms_are_computed_alone_and_together_with_the_gram_matrix() -> None:
    found, differences, _ = read({NORM, GRAM})
    np.testing.assert_allclose(found["norms"], np.linalg.norm(differences, axis=1), rtol=1e-12)
    alone, _, _ = read({NORM})
    assert list(alone) == ["norms"]
    assert (alone["norms"] == found["norms"]).all()


def test_sketches_preserve_distances_between_updates_approximately() -> None:
    found, differences, _ = read({SKETCH}, updates=40)
    assert found["sketches"].shape == (40, SKETCH_SIZE)

    def distances(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        apart = rows[:, None] - rows[None]
        return np.asarray(np.linalg.norm(apart, axis=2)[np.triu_indices(40, 1)])

    ratios = distances(found["sketches"]) / distances(differences)
    assert 0.97 < ratios.mean() < 1.03
    assert 0.7 < ratios.min() < ratios.max() < 1.3


def test_sketch_is_linear_and_depends_on_the_seed() -> None:
    base = {"w": np.zeros(3000, np.float32)}
    one, other = np.random.default_rng(1).integers(-9, 9, (2, 3000)).astype(np.float32)

    def sketches(seed: int, *rows: NDArray[np.float32]) -> NDArray[np.float64]:
        model = tensors(base)
        sent = [EncodedUpdate(tensors({"w": row}), model.layout) for row in rows]
        return read_facts({SKETCH}, sent, model, seed=seed, buffers=(), classes=0)["sketches"]

    first = sketches(1, one, other, one + 2 * other)
    assert (first[0] + 2 * first[1] == first[2]).all()
    assert not (first[0] == sketches(2, one)[0]).all()
    assert (first[1] == sketches(1, other)[0]).all(), "with any other participants"


def test_output_moves_are_the_changes_of_the_output_bias() -> None:
    found, _, (base, sent, _) = read({MOVE})
    expected = [
        each.arrays["head.bias"].astype(np.float64) - base.arrays["head.bias"] for each in sent
    ]
    assert (found["output_moves"] == np.array(expected)).all()


def test_output_moves_without_a_bias_are_mean_changes_of_the_weight_rows() -> None:
    found, _, (_, _, moves) = read({MOVE}, bias=False)
    np.testing.assert_allclose(found["output_moves"], moves.mean(axis=2), rtol=1e-5)


def test_model_without_an_output_layer_for_the_classes_is_refused() -> None:
    with pytest.raises(RunError, match="the model has no output layer of 5 classes"):
        read({MOVE}, classes=5)


def test_update_facts_are_identical_for_any_block_size_and_thread_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(update_facts, "_BLOCK_NUMBERS", 500)
    alone, differences, _ = read({GRAM, SKETCH}, threads=1)
    for _ in range(5):
        together, _, _ = read({GRAM, SKETCH}, threads=4)
        for name, array in alone.items():
            assert (together[name] == array).all()
    np.testing.assert_allclose(alone["gram"], differences @ differences.T, rtol=1e-12)


def test_no_facts_are_returned_if_none_are_requested(tmp_path: Path) -> None:
    found, _, _ = read(set())
    assert found == {}
