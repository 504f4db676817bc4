"""The spool, in which updates wait to be reduced: one verified file per client and attempt."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from potluck.common.errors import disk_error
from potluck.common.tensors.spare_files import SpareFiles

_MOST_SPARE_FILES = 10_000


class Spool:
    """The spool of one run. Blocking; call it from a thread.

    `CLIENT@DIGEST.safetensors` has its announced digest; with `.part` behind, it is on its way.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spare = SpareFiles(folder / "spare", keep=_MOST_SPARE_FILES)

    @property
    def folder(self) -> Path:
        """Its path."""
        return self._folder

    def path(self, round_number: int, attempt: int, client: str, blake3: str) -> Path:
        """Path of a client's update with this digest. Makes the attempt's folder."""
        folder = self._folder / f"{round_number}.{attempt}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / f"{client}@{blake3[:16]}.safetensors"

    def find(self, round_number: int, attempt: int, blake3: str) -> Path | None:
        """A file of an attempt by its digest alone: a sum's, which has many clients."""
        folder = self._folder / f"{round_number}.{attempt}"
        return next(iter(sorted(folder.glob(f"*@{blake3[:16]}.safetensors"))), None)

    def clear_others(self, path: Path) -> None:
        """Forget what a client sent of other files than this one in the same attempt."""
        client = path.name.partition("@")[0]
        for other in path.parent.glob(f"{client}@*"):
            if not other.name.startswith(path.name):
                other.unlink(missing_ok=True)  # it may just have been given its name

    def take_spare(self) -> Path | None:
        """A file of an earlier round to be written over, if there is one."""
        return self._spare.take()

    def clear(
        self,
        round_number: int,
        attempt: int,
        spent: Iterable[Path] = (),
        *,
        keep: Collection[str] = (),
    ) -> None:
        """Forget an attempt's updates; the next one's are written over the `spent` ones. keep: the
        clients whose updates stay.

        Others may still be open, by a check of one that came late: those are only deleted.
        """
        self._spare.clear()
        with contextlib.suppress(FileNotFoundError):
            for path in spent:
                self._spare.give(path)
            self.clear_some(round_number, attempt, keep=keep)

    def clear_some(self, round_number: int, attempt: int, *, keep: Collection[str] = ()) -> None:
        """Delete an attempt's updates, except those of the clients in `keep`."""
        folder = self._folder / f"{round_number}.{attempt}"
        with contextlib.suppress(FileNotFoundError):
            if keep:
                for path in folder.iterdir():
                    if path.name.partition("@")[0] not in keep:
                        path.unlink(missing_ok=True)
            else:
                _remove(folder)

    def clear_except(self, kept: Mapping[tuple[int, int], Collection[str]]) -> None:
        """Delete all updates except those of some attempts, for example after a crash.

        kept: by round and attempt, the clients whose updates stay; all of them if none is named.
        """
        if not self._folder.is_dir():
            return
        for folder in self._folder.iterdir():
            found = [key for key in kept if folder.name == f"{key[0]}.{key[1]}"]
            if not found:
                _remove(folder)
            elif kept[found[0]]:
                self.clear_some(*found[0], keep=kept[found[0]])

    def remove(self) -> None:
        """Forget everything: the run is over."""
        with contextlib.suppress(FileNotFoundError):
            _remove(self._folder)


def _remove(folder: Path) -> None:
    """Delete a folder. Raises FileNotFoundError, or StorageError that names the folder.

    First it gets another name, so that uploads that end meanwhile can't name their files in it.
    """
    doomed = folder.with_name(f"{folder.name}.over")
    try:
        if doomed.exists():  # a kill has left it
            shutil.rmtree(doomed)
        folder.rename(doomed)
        shutil.rmtree(doomed)
    except FileNotFoundError:
        raise
    except OSError as error:  # it names a file as seen from its own folder
        raise disk_error(error, folder) from error
