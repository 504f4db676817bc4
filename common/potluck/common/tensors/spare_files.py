"""Files that nobody needs any more, to be written over by those that come next.

The pages of a new file are found, cleared and accounted for one by one, those of a deleted one
given back. Writing over a file whose pages are in the cache costs half as much, and every round
writes each model and each update anew.
"""

from __future__ import annotations

import itertools
from pathlib import Path


class SpareFiles:
    """Up to `keep` files in a folder of their own. Give and take may run in different threads."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Open the folder, deleting what an earlier process left there. Raises OSError."""
        self._folder = folder
        self._keep = keep
        self._numbers = itertools.count()
        self._files: list[Path] = []
        if folder.is_dir():
            for path in folder.iterdir():
                path.unlink()

    def give(self, path: Path) -> None:
        """Take a file out of its place; delete it if there are enough. It need not exist."""
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
        """A file to be written over and renamed; None if there is none."""
        while True:
            try:
                path = self._files.pop()
            except IndexError:  # asking first would not do: another thread may take the last one
                return None
            if path.is_file():  # somebody may have tidied up
                return path

    def clear(self) -> None:
        """Delete them all."""
        while (path := self.take()) is not None:
            path.unlink(missing_ok=True)
