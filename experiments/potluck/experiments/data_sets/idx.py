"""Reads MNIST's and EMNIST's idx files."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError
from potluck.experiments.data_sets.search import LARGEST, Found, one_of, unpacked

_BYTES: Final = 8
"""Type code for unsigned bytes in an idx file."""


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Return the array of an idx file of bytes, plain or as .gz. Raises ConfigurationError."""
    try:
        with unpacked(path) as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] != _BYTES:
                raise ConfigurationError(f"{path} is not an idx file of bytes", path=path)
            shape = np.frombuffer(file.read(4 * head[3]), dtype=">u4").tolist()
            size = math.prod(shape)
            if len(shape) != head[3] or size > LARGEST:
                raise ConfigurationError(
                    f"{path} has the invalid shape {shape}; download the file again"
                )
            values = np.frombuffer(file.read(size + 1), dtype=np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"can't read {path}: {error}", path=path) from None
    if len(values) != size:
        raise ConfigurationError(
            f"{path} has {len(values)} bytes, but its shape {shape} needs {size}"
        )
    return values.reshape(shape)


def from_idx(folder: Path, train: str, test: str, *, turned: bool = False) -> Found:
    """Return the arrays of a data set whose file names begin with `train` and `test`.

    turned: True if the images in the files are transposed. Raises ConfigurationError.
    """
    found: Found = {}
    for split, prefix in (("train", train), ("test", test)):
        images = read_idx(_file(folder, f"{prefix}-images", 3))
        found[f"x_{split}"] = images.transpose(0, 2, 1) if turned else images
        found[f"y_{split}"] = read_idx(_file(folder, f"{prefix}-labels", 1))
    return found


def _file(folder: Path, name: str, rank: int) -> Path:
    """Return the path of a file, whose name may have a dot in place of the dash."""
    names = [f"{name}{mark}idx{rank}-ubyte{end}" for end in ("", ".gz") for mark in "-."]
    return one_of(folder, *names)


def mnist(folder: Path) -> Found:
    """Return MNIST. Raises ConfigurationError."""
    return from_idx(folder, "train", "t10k")


def emnist(folder: Path) -> Found:
    """Return EMNIST's split "byclass", with upright images. Raises ConfigurationError."""
    return from_idx(folder, "emnist-byclass-train", "emnist-byclass-test", turned=True)
