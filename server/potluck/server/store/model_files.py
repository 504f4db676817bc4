"""The coordinator's model files: content-addressed, written once, served to every host."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from potluck.common.errors import NotFoundError, StorageError
from potluck.common.net.transfer import check_digest
from potluck.common.tensors.compression import compress_file
from potluck.common.tensors.encoding import Encoding
from potluck.common.tensors.large_arrays import large_arrays_in
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.spare_files import SpareFiles
from potluck.common.tensors.tensor_drafts import TensorDraft
from potluck.common.tensors.tensor_files import (
    FileDigest,
    TensorFile,
    file_digest,
    open_tensors,
    write_tensors,
)
from potluck.server.store.file_hold import free_to_delete

NAME = re.compile(r"([0-9a-f]{64})\.(safetensors|json)")
"""Pattern of the names of model files and of their lists of renditions: digest and kind."""


class Rendition(BaseModel):
    """A file in which a model can be fetched, in one encoding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    blake3: str
    size: int
    encoding: Encoding
    base_blake3: str = ""
    compressed: bool = False

    @classmethod
    def whole(cls, digest: FileDigest) -> Rendition:
        """Return the model's own float32 file as a rendition."""
        return cls(blake3=digest.blake3, size=digest.size, encoding=Encoding.FLOAT32)


class ModelVersion(BaseModel):
    """A model, and the files in which it can be fetched, in order of preference."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    blake3: str
    size: int
    renditions: tuple[Rendition, ...]

    @property
    def digests(self) -> frozenset[str]:
        """Digests of all files of the model."""
        return frozenset({self.blake3, *(rendition.blake3 for rendition in self.renditions)})

    def encoding_of(self, blake3: str) -> Encoding:
        """Return the encoding of one of the model's files."""
        encodings = (each.encoding for each in self.renditions if each.blake3 == blake3)
        return next(encodings, Encoding.FLOAT32)


def whole(digest: FileDigest) -> ModelVersion:
    """Return a model whose only file is its float32 file."""
    return ModelVersion(
        blake3=digest.blake3, size=digest.size, renditions=(Rendition.whole(digest),)
    )


class ModelFiles:
    """A folder of tensor files named by their BLAKE3 digest. Blocking; call it from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._fresh: set[str] = set()  # written, but not yet declared as needed by their run
        self._unsettled: set[str] = set()  # written or released: to be checked when tidying up
        self._lent: Counter[str] = Counter()
        self._spare = SpareFiles(folder.with_name(f"{folder.name}.spare"), keep=2)

    def path(self, blake3: str) -> Path:
        """Return the path of the file with this digest, which may not exist."""
        return self._folder / f"{check_digest(blake3)}.safetensors"

    def existing(self, blake3: str) -> Path:
        """Return the path of the file with this digest. Raises NotFoundError."""
        path = self.path(blake3)
        if not path.is_file():
            raise NotFoundError(
                f"file {blake3[:12]}… does not exist or was deleted; request the model of the "
                "current round",
                blake3=blake3,
            )
        return path

    @contextlib.contextmanager
    def lent(self, blake3: str) -> Iterator[Path]:
        """Yield the path of the file with this digest. The file is not overwritten while the block
        runs.

        Raises NotFoundError.
        """
        with self._lock:
            path = self.existing(blake3)
            self._lent[blake3] += 1
        try:
            yield path
        finally:
            with self._lock:
                self._lent[blake3] -= 1
                if not self._lent[blake3]:
                    del self._lent[blake3]

    def write(self, arrays: Mapping[str, NDArray[Any]], layout: Layout | None = None) -> FileDigest:
        """Write arrays to a file named by its digest, synced to disk."""
        temporary = self._temporary()
        try:
            over = self._spare.take()
            digest = write_tensors(temporary, arrays, layout=layout, over=over)
            _sync(temporary)
            self._name(temporary, digest)
        finally:
            temporary.unlink(missing_ok=True)
        return digest

    @contextlib.contextmanager
    def draft(self, layout: Layout) -> Iterator[TensorDraft]:
        """Yield a file to write piece by piece. It is deleted at the end of the block unless `keep`
        was called."""
        draft = TensorDraft(self._temporary(), layout, over=self._spare.take())
        try:
            yield draft
            self._spare.give(draft.path)
        finally:
            draft.close()
            draft.path.unlink(missing_ok=True)

    def keep(self, draft: TensorDraft) -> FileDigest:
        """Rename a complete draft to its digest, synced to disk."""
        digest = draft.finish(sync=True)
        self._name(draft.path, digest)
        return digest

    @contextlib.contextmanager
    def large_arrays(self) -> Iterator[None]:
        """Within this block, allocate large arrays in unnamed files on the models' disk instead of
        memory."""
        with large_arrays_in(self._folder):
            yield

    @property
    def folder(self) -> Path:
        """The folder. Callers may put temporary files there, whose names begin with a dot."""
        return self._folder

    def compress(self, digest: FileDigest) -> FileDigest:
        """Compress a file that was just written; return the digest of the compressed file. The
        original may then be deleted."""
        source = self.existing(digest.blake3)
        temporary = self._temporary()
        try:
            packed = compress_file(source, temporary)
            self._name(temporary, packed)
        finally:
            temporary.unlink(missing_ok=True)
        self.let_go({digest.blake3})
        return packed

    def _temporary(self) -> Path:
        # a random name, because several runs may write the same model
        return self._folder / f".{secrets.token_hex(8)}"

    def _name(self, temporary: Path, digest: FileDigest) -> None:
        with self._lock:
            self._fresh.add(digest.blake3)
            self._unsettled.add(digest.blake3)
            temporary.replace(self.path(digest.blake3))
        _sync(self._folder)  # a row will reference the file, so its name must be on disk

    def publish(self, digest: FileDigest, renditions: Sequence[Rendition]) -> ModelVersion:
        """Write to disk the list of files in which a model can be fetched; return the model."""
        published = ModelVersion(
            blake3=digest.blake3, size=digest.size, renditions=tuple(renditions)
        )
        path = self._notes(digest.blake3)
        temporary = self._temporary()
        try:
            temporary.write_text(published.model_dump_json())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return published

    def published(self, blake3: str) -> ModelVersion:
        """Return a model on disk with its files. If the list of files is missing, the model has
        only its float32 file.

        Like new files, the model's files are kept until the caller declares whether they are
        needed.
        """
        with self._lock:
            found = self._published(blake3)
            self._fresh |= found.digests
            self._unsettled |= found.digests
        return found

    def _published(self, blake3: str) -> ModelVersion:
        path = self.existing(blake3)
        try:
            noted = ModelVersion.model_validate_json(self._notes(blake3).read_text())
            for rendition in noted.renditions:
                self.existing(rendition.blake3)
        except (OSError, ValueError, NotFoundError):
            return whole(FileDigest(blake3=blake3, size=path.stat().st_size))
        return noted

    def _notes(self, blake3: str) -> Path:
        return self._folder / f"{check_digest(blake3)}.json"

    @contextlib.contextmanager
    def opened(self, blake3: str, expected: Layout | None = None) -> Iterator[TensorFile]:
        """Open the file with this digest while the block runs. expected: layout that the file must
        have."""
        with self.lent(blake3) as path, open_tensors(path, expected=expected) as file:
            yield file

    def verify(self, blake3: str) -> None:
        """Compare a file with its digest. Raises NotFoundError; StorageError if the file is
        damaged."""
        path = self.existing(blake3)
        if file_digest(path).blake3 != blake3:
            raise StorageError(
                f"{path} is damaged: its BLAKE3 digest differs from its name; restore it from a "
                "backup, or start a new run",
                path=path,
            )

    def clear_leftovers(self) -> set[str]:
        """Delete incomplete files that a killed coordinator left; return the digests of all other
        files."""
        found: set[str] = set()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    Path(entry.path).unlink()
                elif (named := NAME.fullmatch(entry.name)) is not None:
                    found.add(named[1])
        return found

    # Tidying up -------------------------------------------------------------------------------

    def unsettled(self) -> set[str]:
        """Digests of files that may have become unnecessary: new files, and files that must be
        checked again."""
        with self._lock:
            return set(self._unsettled)

    def reconsider(self, digests: Iterable[str]) -> None:
        """Mark files to check again, because they may no longer be needed."""
        with self._lock:
            self._unsettled |= set(digests)

    def settle(self, digests: Iterable[str]) -> None:
        """Keep these files until `reconsider` is called for them.

        Files whose run has not yet declared whether it needs them are still checked again, even if
        other runs need them.
        """
        with self._lock:
            self._unsettled -= set(digests) - self._fresh

    def needed(self, digests: Iterable[str]) -> None:
        """Record that the runs for which these files were written need them."""
        with self._lock:
            self._fresh -= set(digests)

    def let_go(self, digests: Iterable[str]) -> None:
        """Record that the runs for which these files were written no longer need them; other runs
        may still need them."""
        with self._lock:
            self._fresh -= set(digests)
            self._unsettled |= set(digests)

    def delete(self, digests: Iterable[str]) -> None:
        """Delete these files, except new files of an open round. Delete no file while a backup
        holds the folder.

        One of them is only renamed, so that a new file can overwrite it.
        """
        with self._lock, free_to_delete(self._folder) as free:
            if not free:
                # a backup has locked the folder; the files are checked again after the next round
                return
            for digest in set(digests) - self._fresh:
                self._notes(digest).unlink(missing_ok=True)
                path = self.path(digest)
                if digest in self._lent:
                    path.unlink(missing_ok=True)
                else:
                    self._spare.give(path)
                self._unsettled.discard(digest)


def _sync(path: Path) -> None:
    """Wait until the content of `path` is on disk. Raises StorageError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise StorageError(
            f"can't write {path}: {error.strerror}", path=path, errno=error.errno
        ) from error
    finally:
        os.close(descriptor)
