"""What a sink's libraries print: a file in its folder that does not grow without bound."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

OUTPUT: Final = "output.log"
"""In the sink's folder. Whoever prints appends: its end moves when it is cut."""
EARLIER: Final = "output.log.1"
MOST_BYTES: Final = 1_000_000


def cut(folder: Path, most: int = MOST_BYTES) -> None:
    """Empty the file where it is longer than `most` bytes; the newest half of that many are kept
    in another, in place of those of before. A disk that refuses leaves it as it is."""
    path = folder / OUTPUT
    with contextlib.suppress(OSError):
        if path.stat().st_size <= most:
            return
        with path.open("rb") as file:
            file.seek(-(most // 2), os.SEEK_END)
            (folder / EARLIER).write_bytes(file.read(most // 2))
        os.truncate(path, 0)
