"""Updates that a relay holds until the coordinator has them: a file and a header for each.

The header is written after the file. So after a crash, the file of every header is complete.
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
"""Age at which an incomplete file is deleted; its upload is no longer resumed."""


@dataclass(frozen=True, kw_only=True)
class HeldUpdate:
    """An update that the relay holds. expires: seconds since 1970 from which it is no longer
    needed."""

    header: transfer_pb2.UpdateHeader
    expires: float


class HeldUpdates:
    """The updates in a folder. Not thread-safe, except `path`."""

    def __init__(self, folder: Path, *, now: float) -> None:
        """Read the headers.

        Delete damaged and expired updates, headers without a file, and files without a header. Keep
        files that are still arriving.

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
        """Return all updates that are held."""
        return list(self._updates.values())

    def path(self, update_id: str) -> Path:
        """Return the path of an update's file. Its name is a hash, since an id may hold any
        characters."""
        return self._folder / f"{_file_name(update_id)}.safetensors"

    def keep(self, held: HeldUpdate) -> None:
        """Write the header of an update whose file is complete at `path`. Raises StorageError."""
        record = {"header": held.header.SerializeToString().hex(), "expires": held.expires}
        write_atomically(self._record(held.header.update_id), json.dumps(record))
        self._updates[held.header.update_id] = held

    def holds(self, update_id: str) -> bool:
        """Return True if an update with this id is held, with any digest."""
        return update_id in self._updates

    def find(self, update_id: str, blake3: str) -> HeldUpdate | None:
        """Return the update with this id and digest; None if it is not held."""
        held = self._updates.get(update_id)
        return held if held is not None and held.header.blake3 == blake3 else None

    def drop(self, update_id: str) -> None:
        """Delete an update and the parts of it that have arrived.

        A failure of the disk is logged. The next start then reads the update again, and the
        coordinator decides if it still needs it.
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
