"""Large arrays are stored in unnamed files if a folder is given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from potluck.common.errors import StorageError
from potluck.common.tensors.large_arrays import LARGE_BYTES, copy, empty, large_arrays_in


def mapped_files() -> list[str]:
    """Return the deleted files that are mapped into this process's memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if line.endswith("(deleted)")]


def test_large_array_is_stored_in_the_folder_and_leaves_no_file(tmp_path: Path) -> None:
    with large_arrays_in(tmp_path):
        large = copy(np.arange(LARGE_BYTES, dtype=np.float32).reshape(2, -1))
        small = empty((3,), np.float64)
    assert any(str(tmp_path) in name for name in mapped_files())
    assert list(tmp_path.iterdir()) == []
    large[0, 0] = 7
    assert large[0, :3].tolist() == [7, 1, 2]
    assert large[1, -1] == LARGE_BYTES - 1
    assert small.flags.owndata
    del large
    assert not any(str(tmp_path) in name for name in mapped_files())


def test_large_array_is_in_memory_without_a_folder() -> None:
    assert empty((LARGE_BYTES,), np.float32).flags.owndata


def test_folder_that_can_not_hold_large_arrays_is_named_in_the_error(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with large_arrays_in(gone), pytest.raises(StorageError, match=r"can't allocate .*gone"):
        empty((LARGE_BYTES,), np.float32)
