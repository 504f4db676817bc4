"""Updates that a relay holds until the coordinator has them: a file each, and its header.

The header is written after the file, so one found after a crash speaks of a complete file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from potluck.client.base.state_directory import write_atomically
from potluck.rpc.v1 import transfer_pb2

log = structlog.get_logger()

_STALE_SECONDS = 24 * 3600.0
"""What arrived of a file so long ago is of no use."""


@dataclass(frozen=True, kw_only=True)
class HeldUpdate:
    """An update that is here. expires: seconds since 1970 from which nobody waits for it."""

    header: transfer_pb2.UpdateHeader
    expires: float


class HeldUpdates:
    """The updates in a folder. Not thread-safe; `path` may be called from any thread."""

    def __init__(self, folder: Path, *, now: float) -> None:
        """Read the headers; what is broken, without its other half or expired is deleted, but for
        files on their way.

        `now`: seconds since 1970.
        """
        self._folder = folder
        self._updates: dict[str, HeldUpdate] = {}
        for record in sorted(folder.glob("*.json")):
            held = _read(record)
            if held is None or held.expires <= now:
                continue
            path = self.path(held.header.update_id)
            if path.is_file() and path.stat().st_size == held.header.size:
                self._updates[held.header.update_id] = held
        wanted = {self.path(each) for each in self._updates}
        wanted |= {self._record(each) for each in self._updates}
        for path in folder.iterdir():
            fresh = path.suffix == ".part" and path.stat().st_mtime > now - _STALE_SECONDS
            if path not in wanted and not fresh:
                path.unlink()

    def __len__(self) -> int:
        return len(self._updates)

    def all(self) -> list[HeldUpdate]:
        """Those that are here."""
        return list(self._updates.values())

    def path(self, update_id: str) -> Path:
        """Path of the file of an update. An id may hold anything; its hash may not."""
        return self._folder / f"{_file_name(update_id)}.safetensors"

    def keep(self, held: HeldUpdate) -> None:
        """Keep an update whose file is at `path`. Raises StorageError."""
        record = {"header": held.header.SerializeToString().hex(), "expires": held.expires}
        write_atomically(self._record(held.header.update_id), json.dumps(record))
        self._updates[held.header.update_id] = held

    def holds(self, update_id: str) -> bool:
        """True if an update with this id is here, in whatever file."""
        return update_id in self._updates

    def find(self, update_id: str, blake3: str) -> HeldUpdate | None:
        """The update with this id and digest, if it is here."""
        held = self._updates.get(update_id)
        return held if held is not None and held.header.blake3 == blake3 else None

    def drop(self, update_id: str) -> None:
        """Delete an update and what has arrived of it.

        A disk that refuses is logged: what stays there is read again at the next start, and the
        coordinator knows whether it still waits for it.
        """
        self._updates.pop(update_id, None)
        path = self.path(update_id)
        try:
            for each in (self._record(update_id), path, path.with_name(f"{path.name}.part")):
                each.unlink(missing_ok=True)
        except OSError as error:
            log.warning("update not deleted", update=update_id, error=str(error))

    def _record(self, update_id: str) -> Path:
        return self._folder / f"{_file_name(update_id)}.json"


def _file_name(update_id: str) -> str:
    return hashlib.sha256(update_id.encode()).hexdigest()[:40]


def _read(path: Path) -> HeldUpdate | None:
    try:
        record = json.loads(path.read_bytes())
        header = transfer_pb2.UpdateHeader.FromString(bytes.fromhex(record["header"]))
        return HeldUpdate(header=header, expires=float(record["expires"]))
    except (OSError, ValueError, KeyError, TypeError, DecodeError):
        return None
