"""Finds the files of a download anywhere in its folder."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError

Found = dict[str, NDArray[Any]]
"""Arrays x_train, y_train, x_test, y_test; also a_train, a_test if samples have an attribute."""

LARGEST: Final = 4 << 30
"""Maximum size of an unpacked array in bytes, since a small file could unpack to any size."""


def missing(folder: Path, wanted: str) -> ConfigurationError:
    """Return the error for a folder without a suitable file."""
    return ConfigurationError(f"{folder} does not contain {wanted}", path=folder)


@contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open a file; if its name ends in .gz or .bz2, its bytes are unpacked while they are read."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
    with openers.get(path.suffix, open)(path, "rb") as file:
        yield cast(BinaryIO, file)


def one_of(folder: Path, *patterns: str) -> Path:
    """Return the first file below the folder that matches a pattern. Raises ConfigurationError."""
    for pattern in patterns:
        for path in sorted(folder.rglob(pattern)):
            if path.is_file():
                return path
    raise missing(folder, " or ".join(patterns))


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file whose name stands in a downloaded file.

    Raises ConfigurationError if the path is outside the folder.
    """
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ConfigurationError(f"{name} is outside {folder}", path=folder)
    return path
