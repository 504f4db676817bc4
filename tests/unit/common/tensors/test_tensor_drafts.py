"""Files written piece by piece equal those written at once."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from potluck.common.errors import StorageError
from potluck.common.tensors.encoding import (
    EncodedUpdate,
    Encoding,
    encode,
    encoded_layout,
    write_encoded,
)
from potluck.common.tensors.flat import FlatVector
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_drafts import TensorDraft, drafted
from potluck.common.tensors.tensor_files import open_tensors, write_tensors


def model(seed: int) -> dict[str, NDArray[Any]]:
    """Return tensors whose order in a file differs from their order in the vector: some are not
    floating-point, wider, or empty."""
    draw = np.random.default_rng(seed)
    return {
        "a": draw.normal(size=(70, 1000)).astype(np.float32),
        "steps": np.array(seed, np.int64),
        "indices": draw.integers(0, 9, 7).astype(np.int32),
        "empty": np.empty((0, 3), np.float32),
        "b": draw.normal(size=301).astype(np.float32),
        "flags": np.array([True, False, True]),
        "c": np.array(draw.normal(), np.float32),
    }


def test_blocks_written_in_any_order_give_the_same_file(tmp_path: Path) -> None:
    arrays = model(1)
    layout = Layout.of(arrays)
    vector = FlatVector(arrays, layout)
    begins = list(range(0, len(vector), 997))
    random.Random(2).shuffle(begins)
    scratch = np.empty(997, np.float32)
    with drafted(tmp_path / "draft", layout) as draft:
        for begin in begins:
            end = min(begin + 997, len(vector))
            draft.put_flat(begin, vector.block(begin, end, scratch))
        for name in ("steps", "flags"):
            draft.put(name, 0, arrays[name])
        for begin in (4, 0):
            draft.put("indices", begin, arrays["indices"][begin : begin + 4])
        digest = draft.finish()
    assert digest == write_tensors(tmp_path / "whole", arrays)
    assert (tmp_path / "draft").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "whole"]


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("delta", [False, True])
def test_encoded_and_decoded_files_equal_those_computed_in_memory(
    tmp_path: Path, encoding: Encoding, *, delta: bool
) -> None:
    arrays, before = model(1), model(2)
    layout = Layout.of(arrays)
    form = encoded_layout(layout, encoding)
    base = before if delta else None

    def generator() -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(3))

    with drafted(tmp_path / "draft", form) as draft:
        write_encoded(draft, arrays, encoding, base=base, generator=generator())
        digest = draft.finish()
    encoded = encode(arrays, encoding, base=base, generator=generator())
    assert digest == write_tensors(tmp_path / "whole", encoded, layout=form)
    write_tensors(tmp_path / "base", before)
    with open_tensors(tmp_path / "draft") as file, open_tensors(tmp_path / "base") as base_file:
        update = EncodedUpdate(file, layout, encoding, base_file if delta else None)
        with drafted(tmp_path / "decoded", layout) as draft:
            update.decode_to(draft)
            digest = draft.finish()
        assert digest == write_tensors(tmp_path / "copied", update.decode_to_arrays())


def test_draft_over_a_longer_spare_file_is_truncated(tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    spare.write_bytes(b"x" * 10_000)
    arrays = {"w": np.arange(5, dtype=np.float32)}
    with drafted(tmp_path / "draft", Layout.of(arrays), over=spare) as draft:
        draft.put("w", 0, arrays["w"])
        digest = draft.finish()
    assert digest == write_tensors(tmp_path / "whole", arrays)
    assert (tmp_path / "draft").stat().st_size == digest.size
    assert not spare.exists()


def test_values_written_to_draft_arrays_are_in_the_file(tmp_path: Path) -> None:
    arrays = {"w": np.arange(5, dtype=np.float32)}
    with drafted(tmp_path / "draft", Layout.of(arrays)) as draft:
        draft.put("w", 0, arrays["w"])
        found = draft.arrays
        found["w"][1] = 7.0
        assert draft.holds(found)
        assert draft.holds(dict(found))
        assert not draft.holds({"w": found["w"].copy()})
        draft.finish()
    with open_tensors(tmp_path / "draft") as file:
        assert file.arrays["w"].tolist() == [0, 7, 2, 3, 4]


def test_failed_draft_leaves_no_file(tmp_path: Path) -> None:
    layout = Layout.of({"w": np.zeros(5, np.float32)})
    with pytest.raises(ZeroDivisionError), drafted(tmp_path / "draft", layout):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match=r"can't write tensor file .*: No such file"):
        TensorDraft(tmp_path / "missing" / "draft", layout)


def test_draft_is_synced_before_it_is_finished_and_a_sync_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {"w": np.arange(5, dtype=np.float32)}
    synced: list[int] = []

    def refuse(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        if len(synced) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    layout = Layout.of(arrays)
    with drafted(tmp_path / "draft", layout) as draft:
        draft.put("w", 0, arrays["w"])
        plain = draft.finish()
        assert synced == []
        assert draft.finish(sync=True) == plain
        assert synced == [layout.file_bytes]
        with pytest.raises(StorageError, match="Input/output error"):
            draft.finish(sync=True)
