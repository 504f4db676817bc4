"""A disk that fails under open tensor files is an error that names the file; the process lives."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import mounts

from potluck.common.errors import StorageError
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.server.reduce.reduction import reduce
from potluck.server.strategy import Combine

pytestmark = pytest.mark.skipif(
    bool(mounts.why_no_failing_disk()), reason=mounts.why_no_failing_disk() or "can mount"
)
ARRAYS = {"first": np.ones(1000, np.float32), "second": np.ones(1 << 20, np.float32)}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[mounts.FailingDisk]:
    with mounts.failing_disk(tmp_path / "state", megabytes=32) as disk:
        yield disk


def test_read_error_of_an_open_update_names_the_file(
    tmp_path: Path, disk: mounts.FailingDisk
) -> None:
    model, update = tmp_path / "model", tmp_path / "state" / "update"
    write_tensors(model, ARRAYS)
    write_tensors(update, ARRAYS)
    combine = Combine(weights=np.ones(1))
    with open_tensors(model) as current, open_tensors(update) as file:
        assert reduce([file], combine, current)["second"].all()
        disk.lose_data(update)
        with pytest.raises(StorageError) as of_reduction:
            reduce([file], combine, current)
        with pytest.raises(StorageError) as of_tensor:
            _ = file.arrays["second"]
    for caught in (of_reduction, of_tensor):
        assert caught.value.message == f"can't read tensor file {update}: {os.strerror(errno.EIO)}"
