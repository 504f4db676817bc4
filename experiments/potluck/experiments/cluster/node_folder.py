"""The folder on a machine of a cluster: data files by digest, and folders of running cells."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from potluck.common.errors import (
    ConfigurationError,
    DigestMismatchError,
    StorageError,
    disk_error,
)
from potluck.common.process.folder_lock import FolderLock
from potluck.common.tensors.digest import digest_of_file, hasher
from potluck.experiments.cluster.sent_data import DataFile

Pieces = Callable[[DataFile], Iterable[memoryview]]
"""Function that yields the bytes of a file in pieces."""


def usual_folder() -> Path:
    """Return the folder's path on this machine: potluck-UID in the folder for temporary files."""
    return Path(tempfile.gettempdir()) / f"potluck-{os.getuid()}"


class NodeFolder:
    """The folder that all processes of one user share on a machine."""

    def __init__(self, root: Path) -> None:
        """Make the folder, accessible to its owner only.

        Raises StorageError if another user owns it.
        """
        self._files, self._cells = root / "files", root / "cells"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if root.is_symlink() or root.stat().st_uid != os.getuid():
                raise StorageError(
                    f"the folder {root} belongs to another user; remove the folder, or set TMPDIR "
                    "on this machine",
                    path=root,
                )
            root.chmod(0o700)
            for each in (self._files, self._cells):
                each.mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(error, root) from error

    @contextlib.contextmanager
    def workplace(self) -> Iterator[Path]:
        """Yield a new folder, which is removed at the end of the block.

        Also remove such folders that killed processes have left.
        """
        with self._alone(self._cells):
            self._sweep()
            folder = self._cells / secrets.token_hex(8)
            folder.mkdir()
            lock = self._lock(folder)
        try:
            with lock:
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def data_folder(self, folder: Path, files: Sequence[DataFile], pieces: Pieces) -> Path:
        """Make `folder` a data directory of these files; fetch those that this machine lacks.

        Each file is verified by its digest, even if it was not fetched. Raises DigestMismatchError
        or StorageError.
        """
        try:
            folder.mkdir()
            for file in files:
                path = folder / file.path
                if not path.resolve().is_relative_to(folder.resolve()):
                    raise StorageError(f"{file.path} is outside the data directory")
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(self._kept(file, pieces), path)
        except OSError as error:
            raise disk_error(error, folder) from error
        return folder

    def _kept(self, file: DataFile, pieces: Pieces) -> Path:
        path = self._files / file.blake3
        with self._alone(self._files):  # each file is fetched once for all processes
            if path.exists() and digest_of_file(path) == (file.blake3, file.size):
                return path
            partial = path.with_suffix(".partial")
            digest = hasher()
            with partial.open("wb") as output:
                for piece in pieces(file):
                    digest.update(piece)
                    output.write(piece)
            if digest.hexdigest() != file.blake3:
                partial.unlink()
                raise DigestMismatchError(
                    f"{file.path} has digest {digest.hexdigest()[:12]}…, but {file.blake3[:12]}… "
                    "was announced; do not change data files during the run",
                    path=file.path,
                )
            partial.chmod(0o400)
            partial.replace(path)
            return path

    def _sweep(self) -> None:
        for folder in self._cells.iterdir():
            if folder.is_dir():
                with contextlib.suppress(ConfigurationError), self._lock(folder):
                    shutil.rmtree(folder, ignore_errors=True)

    def _lock(self, folder: Path) -> FolderLock:
        return FolderLock(folder, holder="cell", remedy="let it end")

    @contextlib.contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        """Lock a folder while the block runs; other processes wait."""
        with (folder / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
