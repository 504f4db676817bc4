"""The log file with the output of a sink's libraries, of limited size."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

OUTPUT: Final = "output.log"
"""Name of the file in the sink's folder. Libraries append to it, so after it is emptied, they write
at its new end."""
EARLIER: Final = "output.log.1"
MOST_BYTES: Final = 1_000_000


def cut(folder: Path, most: int = MOST_BYTES) -> None:
    """Empty the file if it is longer than `most` bytes.

    Its last `most // 2` bytes are first copied to the file `EARLIER`, which is overwritten. Disk
    errors are ignored.
    """
    path = folder / OUTPUT
    with contextlib.suppress(OSError):
        if path.stat().st_size <= most:
            return
        with path.open("rb") as file:
            file.seek(-(most // 2), os.SEEK_END)
            (folder / EARLIER).write_bytes(file.read(most // 2))
        os.truncate(path, 0)
