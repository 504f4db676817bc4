"""The log of messages that clients sent, except profiles and sums, which have ledgers.

Each client has one file of JSON lines in the state directory's `outgoing`. A file that has grown
large is compressed into the client's folder there, and a new file is begun; no line is dropped. A
line is written before its message is sent, but not synced to disk. So it survives if the process is
killed, but a power failure may lose the lines of the last seconds. The log is for people only; no
decision depends on it.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from potluck.client.base.state_directory import clients_with_files, storage_error
from potluck.common.errors import StorageError
from potluck.rpc.v1 import coordinator_pb2 as rpc

LARGEST_BYTES: Final = 4 << 20
"""Maximum size of a file before it is compressed; some 10,000 lines."""
_LONGEST_TEXT: Final = 2000
_COMPRESSED: Final = ".jsonl.gz"


class Outgoing(StrEnum):
    """The kinds of messages in the log."""

    ANSWER = "answer"
    HELD_OUT = "held-out counts"
    UPDATE = "update"
    FAILURE = "failure"


class OutgoingLog:
    """The logs of all clients in a folder. Calls block; one caller at a time may write."""

    def __init__(self, folder: Path, *, federation: str = "", coordinator: str = "") -> None:
        """`federation` and `coordinator`: the recipient of the messages; not needed to read the
        log.
        """
        self._folder = folder
        self._to = {"federation": federation, "coordinator": coordinator}
        self._sizes: dict[str, int] = {}

    def note(self, instruction: rpc.Instruction, kind: Outgoing, **what: Any) -> None:
        """Log a message that is about to be sent for an instruction. what: JSON values.

        Raises StorageError; then the message must not be sent.
        """
        entry = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "kind": kind.value,
            **self._to,
            "run": instruction.run_id,
            "round": instruction.round,
            **what,
        }
        line = (json.dumps(entry, separators=(",", ":")) + "\n").encode()
        client = instruction.client_id
        path = self._path(client)
        try:
            size = self._sizes.get(client)
            if size is None:
                size, line = _mended(path, line)
            if size + len(line) > LARGEST_BYTES:
                self._compress(client)
                size = 0
            _append(path, line)
        except OSError as error:
            self._sizes.pop(client, None)
            raise storage_error(path, error) from error
        self._sizes[client] = size + len(line)

    def entries(self, client: str) -> Iterator[Mapping[str, Any]]:
        """Yield the entries of a client, oldest first; skip lines damaged by a power failure.

        Raises StorageError if a file can't be read.
        """
        for path in [*self._parts(client), self._path(client)]:
            try:
                packed = path.suffix == ".gz"
                text = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
            except FileNotFoundError:
                continue
            except (OSError, EOFError) as error:
                raise StorageError(f"can't read {path}: {error}", path=path) from error
            for line in text.splitlines():
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict):
                    yield found

    def clients(self) -> list[str]:
        """Return the clients that have a log, sorted."""
        return clients_with_files(self._folder, ".jsonl")

    def _parts(self, client: str) -> list[Path]:
        """Return the client's full files, oldest first; uncompressed if compressing failed."""
        found: dict[int, Path] = {}
        for path in sorted((self._folder / client).glob("*.jsonl*")):
            number = path.name.partition(".")[0]
            if number.isdecimal() and path.name.endswith((".jsonl", _COMPRESSED)):
                found[int(number)] = path  # if both exist, the compressed one is used
        return [found[number] for number in sorted(found)]

    def _compress(self, client: str) -> None:
        """Move the client's file into its folder and compress it there."""
        folder = self._folder / client
        folder.mkdir(mode=0o700, exist_ok=True)
        taken = {path.name.partition(".")[0] for path in folder.iterdir()}
        number = next(str(n) for n in itertools.count(1) if str(n) not in taken)
        full, packed = folder / f"{number}.jsonl", folder / f"{number}{_COMPRESSED}"
        self._path(client).replace(full)
        partial = packed.with_suffix(".new")
        partial.write_bytes(gzip.compress(full.read_bytes(), compresslevel=6))
        partial.replace(packed)
        full.unlink()

    def _path(self, client: str) -> Path:
        return self._folder / f"{client}.jsonl"


def shortened(text: str) -> str:
    """Return a text from the coordinator or a plug-in, cut to `_LONGEST_TEXT` characters."""
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"


def _mended(path: Path, line: bytes) -> tuple[int, bytes]:
    """Return the size of a file from an earlier process, and the bytes to append for `line`.

    If the file ends in half a line, these begin with a newline.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(-1, os.SEEK_END)
                return size, line if file.read() == b"\n" else b"\n" + line
    except FileNotFoundError:
        pass
    return 0, line


def _append(path: Path, line: bytes) -> None:
    """Append a whole line; if that fails, leave the file unchanged."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        written = os.write(file, line)
        if written < len(line):
            os.ftruncate(file, os.fstat(file).st_size - written)
            raise OSError(None, "the disk is full")
    finally:
        os.close(file)
