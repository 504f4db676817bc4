"""Receives files: transfers can be resumed, and complete files are verified.

A file that is being received is `PATH.part`; it is renamed to `PATH` once its length and digest
match the announced ones. If a transfer breaks, the part is kept, and the next transfer may resume
from it. A spare file that is being overwritten is `PATH.over`; if the transfer breaks, the file is
cut to the bytes received. A killed process may leave an `.over` file; its content is never used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from potluck.common.errors import (
    DigestMismatchError,
    ProtocolError,
    TooLargeError,
    TruncatedError,
)
from potluck.common.interruptible import interruption, shielded
from potluck.common.net.protocol import CHUNK_BYTES
from potluck.common.tensors.digest import file_pieces, hasher
from potluck.common.tensors.holes import write_at

_BLAKE3 = re.compile(r"[0-9a-f]{64}")


def check_digest(text: str) -> str:
    """Return `text` if it is a BLAKE3 digest in lower-case hexadecimal digits, else raise
    ProtocolError."""
    if _BLAKE3.fullmatch(text) is None:
        raise ProtocolError(
            f"a BLAKE3 digest is 64 lower-case hexadecimal digits, not {text[:80]!r}",
            blake3=text[:80],
        )
    return text


def check_size(size: int, maximum: int) -> None:
    """Raise TooLargeError if the announced size is above `maximum`."""
    if size > maximum:
        raise TooLargeError(
            f"the sender announced a file of {size} bytes, but at most {maximum} bytes are "
            "accepted; raise maximum_model_bytes of the receiver",
            size=size,
            maximum=maximum,
        )


class FileReceiver:
    """Writes an announced file to disk and verifies it.

    Not thread-safe. `close` may be called at any time; the partial file is kept so that a later
    transfer can resume. `finish` hashes the bytes once all have arrived, since hashing earlier
    would slow down the code that reads from the network. `verified` runs it in a thread.
    """

    def __init__(
        self,
        path: Path,
        *,
        blake3: str,
        size: int,
        offset: int,
        maximum: int,
        over: Path | None = None,
    ) -> None:
        """Start a file, or resume it at `offset`.

        over: a file to overwrite. If there is a part to resume, this file is deleted instead.

        Raises TooLargeError if the announced size is above `maximum`, ProtocolError if there is no
        part with at least `offset` bytes.
        """
        check_size(size, maximum)
        if offset > size:
            raise ProtocolError(
                f"the transfer starts at offset {offset}, but the file has only {size} bytes"
            )
        self._path = path
        self._part = part_path(path)
        self._blake3 = check_digest(blake3)
        self._size = size
        self._received = offset
        self._writing = self._part
        if over is not None and offset:
            over.unlink(missing_ok=True)
        elif over is not None:
            self._part.unlink(missing_ok=True)
            self._writing = path.with_name(path.name + ".over")
            over.replace(self._writing)
        flags = os.O_RDWR | os.O_CREAT | (0 if over is not None else os.O_TRUNC)
        if offset:
            flags = os.O_RDWR
            _require_held(path, offset)
        self._file = os.fdopen(os.open(self._writing, flags, 0o600), "r+b", buffering=0)
        try:
            if offset:
                self._file.truncate(offset)
        except BaseException:
            self._file.close()
            raise

    @property
    def blake3(self) -> str:
        """The announced digest."""
        return self._blake3

    @property
    def size(self) -> int:
        """The announced length in bytes."""
        return self._size

    @property
    def received(self) -> int:
        """Number of bytes of the file that are on disk."""
        return self._received

    def write(self, chunk: bytes | memoryview) -> None:
        """Write the next bytes. Raises TooLargeError if they exceed the announced size."""
        if not chunk:
            raise ProtocolError(
                "the sender sent an empty chunk; a chunk must have at least one byte"
            )
        if self._received + len(chunk) > self._size:
            raise TooLargeError(
                f"the sender announced {self._size} bytes and sent more; announce the file's size",
                size=self._size,
            )
        write_at(self._file.fileno(), memoryview(chunk), self._received)
        self._received += len(chunk)

    def finish(self, blake3: str, *, see: Callable[[memoryview], None] | None = None) -> Path:
        """Verify length and digest, and give the file its name. Reads the whole file.

        see: function called with the file's bytes in order, in pieces that it must not store.
        Raises TruncatedError (the part is kept) or DigestMismatchError (the part is deleted: the
        file must be sent again from its start).
        """
        if self._received != self._size:
            raise TruncatedError(
                f"{self._received} of {self._size} bytes arrived; send the rest",
                received=self._received,
                size=self._size,
            )
        actual = self._digest(see)
        if actual != self._blake3 or check_digest(blake3) != self._blake3:
            self._writing.unlink(missing_ok=True)
            raise DigestMismatchError(
                f"the file announced as {self._blake3[:12]}… has BLAKE3 digest {actual[:12]}…; "
                "send it again from its start",
                announced=self._blake3,
                actual=actual,
            )
        self._cut()
        self._file.close()
        self._writing.replace(self._path)
        return self._path

    def _digest(self, see: Callable[[memoryview], None] | None) -> str:
        digest, check = hasher(), interruption()
        for piece in file_pieces(self._file.fileno(), 0, self._size, CHUNK_BYTES):
            check()
            digest.update(piece)
            if see is not None:
                see(piece)
        return digest.hexdigest()

    def close(self) -> None:
        """Stop writing. The bytes received remain as the part."""
        if self._file.closed:
            return
        with self._file:
            if self._writing != self._part:
                self._cut()
                with contextlib.suppress(FileNotFoundError):  # `finish` may have deleted it
                    self._writing.replace(self._part)

    def _cut(self) -> None:
        """Cut the file to the bytes received, if it overwrites a longer spare file."""
        if os.fstat(self._file.fileno()).st_size > self._received:
            self._file.truncate(self._received)


async def verified(receiver: FileReceiver, blake3: str) -> Path:
    """Run `FileReceiver.finish` in a thread. Returns once the receiver may be closed."""
    return await shielded(asyncio.to_thread(receiver.finish, blake3))


def part_path(path: Path) -> Path:
    """Return the path of the incomplete file."""
    return path.with_name(path.name + ".part")


def _require_held(path: Path, offset: int) -> None:
    held = held_bytes(path)
    if held < offset:
        raise ProtocolError(
            f"the transfer resumes at offset {offset}, but only {held} bytes have arrived; resume "
            f"at or before {held}",
            offset=offset,
            held=held,
        )


def held_bytes(path: Path) -> int:
    """Return the number of bytes in the part of a file; 0 without a part."""
    try:
        return part_path(path).stat().st_size
    except FileNotFoundError:
        return 0
