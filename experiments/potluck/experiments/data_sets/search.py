"""The files of a download are found wherever they lie in its folder."""

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
"""x_train, y_train, x_test, y_test, and a_train, a_test where samples have an attribute."""

LARGEST: Final = 4 << 30
"""Bytes of an unpacked array, at most: a small file must not unpack without end."""


def missing(folder: Path, wanted: str) -> ConfigurationError:
    """The error that says that nothing suitable is in the folder."""
    return ConfigurationError(f"{folder} holds no {wanted}", path=folder)


@contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open a file; its bytes are unpacked as they are read where its name ends in .gz or .bz2."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
    with openers.get(path.suffix, open)(path, "rb") as file:
        yield cast(BinaryIO, file)


def one_of(folder: Path, *patterns: str) -> Path:
    """The first file under the folder that matches a pattern. Raises ConfigurationError."""
    for pattern in patterns:
        for path in sorted(folder.rglob(pattern)):
            if path.is_file():
                return path
    raise missing(folder, " or ".join(patterns))


def inside(folder: Path, name: str) -> Path:
    """A file of a folder by a name that a file gives. Raises ConfigurationError if it leads out."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ConfigurationError(f"{name} leads out of {folder}", path=folder)
    return path
