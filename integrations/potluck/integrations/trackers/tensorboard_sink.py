"""A sink that writes event files for TensorBoard."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from potluck.server.sink import Sink, TrackedRound, TrackedRun

_VERSION: Final = "brain.Event:2"
_LENGTH: Final = struct.Struct("<Q")
_CHECKSUM: Final = struct.Struct("<I")
_FORBIDDEN: Final = re.compile(r"[^\w.-]", re.ASCII)


class TensorBoard(Sink):
    """Writes a folder with one event file per run, and one event per round.

    An event has all numbers of its round. A killed process can leave an incomplete event; it is
    removed before the next one is appended.
    """

    alone_in = "folder"
    library = "tensorboard"
    extra = "potluck[tensorboard]"

    def __init__(self, *, folder: str = ".") -> None:
        """folder: the folder for `tensorboard --logdir`; made if missing."""
        self._folder = Path(folder)

    def open(self, run: TrackedRun) -> int:
        """Remove an incomplete last event; return the step of the last complete one, or 0."""
        path = self._path(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.exists() else b""
        last = whole = 0
        for end, record in _records(data):
            last, whole = max(last, _event().FromString(record).step), end
        if whole < len(data):
            os.truncate(path, whole)
        if not whole:
            created = run.created_at.timestamp()
            path.touch()
            _append(path, [_event(wall_time=created, file_version=_VERSION)])
        return last

    def write(self, run: TrackedRun, rounds: Sequence[TrackedRound]) -> None:
        """Append the rounds' events."""
        events = [
            _event(
                wall_time=each.committed_at.timestamp(),
                step=each.number,
                summary={
                    "value": [
                        {"tag": name, "simple_value": value} for name, value in each.numbers.items()
                    ]
                },
            )
            for each in rounds
        ]
        _append(self._path(run), events)

    def _path(self, run: TrackedRun) -> Path:
        folder = _FORBIDDEN.sub("_", f"{run.name}-{run.run_id}")
        began = int(run.created_at.timestamp())
        return self._folder / folder / f"events.out.tfevents.{began}.potluck"


def _event(**fields: object) -> Any:
    """Return a TensorBoard event message. Typed as Any: its module has no type hints."""
    from tensorboard.compat.proto import event_pb2

    messages: Any = event_pb2
    return messages.Event(**fields)


def _append(path: Path, events: Sequence[Any]) -> None:
    framed = b"".join(_framed(event.SerializeToString()) for event in events)
    with path.open("r+b") as file:  # fails if the file was removed: then `open` makes a new one
        file.seek(0, os.SEEK_END)
        file.write(framed)
        file.flush()
        os.fsync(file.fileno())


def _framed(record: bytes) -> bytes:
    """Frame a record as TensorFlow does: length, checksum of the length, record, its checksum."""
    length = _LENGTH.pack(len(record))
    return length + _checksum(length) + record + _checksum(record)


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (end, record) of the complete records at the start of the data."""
    begin, head = 0, _LENGTH.size + _CHECKSUM.size
    while begin + head <= len(data):
        length = data[begin : begin + _LENGTH.size]
        if _checksum(length) != data[begin + _LENGTH.size : begin + head]:
            return
        end = begin + head + int(_LENGTH.unpack(length)[0])
        record = data[begin + head : end]
        if _checksum(record) != data[end : end + _CHECKSUM.size]:
            return
        begin = end + _CHECKSUM.size
        yield begin, record


def _checksum(data: bytes) -> bytes:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    return bytes(_CHECKSUM.pack(masked_crc32c(data)))
