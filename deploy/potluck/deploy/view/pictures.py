"""Writes plots to exactly the given path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from potluck.common.errors import ConfigurationError, StorageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIX = ".png"


def check_picture(path: Path) -> None:
    """Raise ConfigurationError if no plot can be written to `path`. Call it before work is done."""
    if path.suffix.lower() != SUFFIX:
        raise ConfigurationError(
            f"{path}: pictures are PNG files; name the file {path.with_suffix(SUFFIX)}", path=path
        )
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise ConfigurationError(
            f"can't write the file {path}; name a file in a folder that exists", path=path
        )


def write_picture(figure: Figure, path: Path, *, dpi: int) -> None:
    """Write a figure as PNG. Raises StorageError."""
    try:
        # Without a format, matplotlib would append a suffix to names that have none.
        figure.savefig(
            path, format="png", dpi=dpi, facecolor="white", metadata={"Software": "Potluck"}
        )
    except OSError as error:
        raise StorageError(f"can't write {path}: {error.strerror}", path=path) from None
