"""Reads Covertype: the seven-class table, and the two-class table in LIBSVM's format."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError
from potluck.experiments.data_sets.search import Found, one_of, unpacked


def covertype(folder: Path) -> Found:
    """Return the seven-class data (labels 0 to 6): the first 15,120 rows, 11,340 of them to train.

    Raises ConfigurationError.
    """
    path = one_of(folder, "covtype.data", "covtype.data.gz")
    try:
        with unpacked(path) as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.int16, max_rows=15_120)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"can't read {path}: {error}", path=path) from None
    if table.shape != (15_120, 55):
        raise ConfigurationError(
            f"{path} has shape {table.shape}, but at least 15,120 rows of 55 are expected"
        )
    x, y = table[:, :-1], (table[:, -1] - 1).astype(np.uint8)
    return {
        "x_train": x[:11_340].copy(), "y_train": y[:11_340],
        "x_test": x[11_340:].copy(), "y_test": y[11_340:],
    }  # fmt: skip


def covertype_binary(folder: Path) -> Found:
    """Return the two-class data, whose labels 1 and 2 become 0 and 1.

    A random 80 % of the samples are for training, the rest for test.

    Raises ConfigurationError.
    """
    path = one_of(folder, "covtype.libsvm.binary.scale*", "covtype.libsvm.binary*")
    rows: list[NDArray[np.float32]] = []
    labels: list[int] = []
    try:
        with unpacked(path) as file:
            for line in file:
                label, *entries = line.decode("ascii").split()
                row = np.zeros(54, dtype=np.float32)
                for entry in entries:
                    column, _, value = entry.partition(":")
                    row[int(column) - 1] = float(value)
                rows.append(row)
                labels.append(int(float(label)))
    except (OSError, ValueError, IndexError, EOFError) as error:
        raise ConfigurationError(f"can't read {path}: {error}", path=path) from None
    if set(labels) != {1, 2}:
        raise ConfigurationError(f"{path}: labels are {sorted(set(labels))[:5]}, expected 1 and 2")
    x, y = np.stack(rows), np.array(labels, dtype=np.uint8) - 1
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[: len(y) * 4 // 5], order[len(y) * 4 // 5 :]
    return {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}
