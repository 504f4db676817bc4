"""Keeps files that are no longer needed, so that later files can overwrite them.

For a new file, the kernel finds, clears and accounts for pages one by one, and for a deleted file
it frees them. Overwriting a file whose pages are in the cache costs half as much. This matters
because every round writes new models and updates.
"""

from __future__ import annotations

import itertools
from pathlib import Path


class SpareFiles:
    """Up to `keep` files for reuse, in a separate folder.

    `give` and `take` may be called from different threads.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Open the folder, and delete the files that an earlier process left there. Raises
        OSError."""
        self._folder = folder
        self._keep = keep
        self._numbers = itertools.count()
        self._files: list[Path] = []
        if folder.is_dir():
            for path in folder.iterdir():
                path.unlink()

    def give(self, path: Path) -> None:
        """Move a file into the folder. Delete it if there are `keep` files already. The file need
        not exist."""
        try:
            if len(self._files) >= self._keep:
                path.unlink(missing_ok=True)
                return
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            spare = self._folder / str(next(self._numbers))
            path.replace(spare)
        except FileNotFoundError:
            return
        self._files.append(spare)

    def take(self) -> Path | None:
        """Remove a file from the folder, to be overwritten and renamed, and return its path; None
        if the folder is empty."""
        while True:
            try:
                path = self._files.pop()
            except IndexError:  # not checked before: another thread may take the last file
                return None
            if path.is_file():  # skip a file that was deleted since
                return path

    def clear(self) -> None:
        """Delete all files of the folder."""
        while (path := self.take()) is not None:
            path.unlink(missing_ok=True)
