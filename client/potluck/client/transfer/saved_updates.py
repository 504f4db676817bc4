"""Updates kept until their round is over: for each, a tensor file and a record that describes it.

The record is written after the file, so a record found after a crash has a complete file.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from potluck.client.base.state_directory import write_atomically
from potluck.common.real_time import seconds_of
from potluck.common.tensors.spare_files import SpareFiles
from potluck.common.tensors.tensor_files import FileDigest
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc

KEEP_AFTER_DEADLINE_SECONDS = 24 * 3600.0
"""Seconds after its deadline at which an update is deleted.

If it is requested after that, the client trains again.
"""


class KeptUpdate(BaseModel):
    """The record of an update; fields as in `UpdateHeader`.

    `expires`: the deadline of its round, in seconds since 1970. `work`: the digest of the work, by
    `digest_of_training`. `offer`: numbers that are sent before the update; empty if it is sent at
    once. For a masked update, `masked_input`: the serialised envelope that confirms it,
    hexadecimal; `coordinator_id`: the process that drives its sum.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    update_id: str
    client_id: str
    run_id: str
    round: int
    blake3: str
    size: int
    encoding: int
    delta: bool
    compressed: bool
    report: UpdateReport = UpdateReport()
    expires: float
    work: str = ""
    offer: dict[str, float] = {}
    masked_input: str = ""
    coordinator_id: str = ""


def update_record(
    instruction: rpc.Instruction,
    file: FileDigest,
    report: UpdateReport,
    *,
    work: str,
    offer: Mapping[str, float] | None = None,
    masked_input: str = "",
    coordinator_id: str = "",
) -> KeptUpdate:
    """Return the record of a training's update. file: the update's file.

    work: the digest of the work, by `digest_of_training`. offer: numbers that are sent before the
    update. For a masked update, `report` is empty and `masked_input` and `coordinator_id` are
    given."""
    train = instruction.train
    return KeptUpdate(
        update_id=instruction.id,
        client_id=instruction.client_id,
        run_id=instruction.run_id,
        round=instruction.round,
        blake3=file.blake3,
        size=file.size,
        encoding=train.encoding,
        delta=train.delta,
        compressed=train.compressed and not masked_input,
        report=report,
        expires=time.time() + seconds_of(instruction.time_left),
        work=work,
        offer=dict(offer or {}),
        masked_input=masked_input,
        coordinator_id=coordinator_id,
    )


class KeptUpdates:
    """The updates in a folder. Not thread-safe; `path` may be called from any thread."""

    def __init__(self, folder: Path, *, now: float) -> None:
        """Read the records; delete updates that are damaged, incomplete or expired.

        `now`: seconds since 1970.
        """
        self._folder = folder
        self.spare = SpareFiles(folder.with_name(f"{folder.name}.spare"), keep=1)
        """The file of a dropped update, if any; it may be overwritten."""
        self._updates: dict[str, KeptUpdate] = {}
        for record in sorted(folder.glob("*.json")):
            update = _read(record)
            if (
                update is not None
                and update.expires + KEEP_AFTER_DEADLINE_SECONDS > now
                and _has_size(self.path(update.update_id), update.size)
            ):
                self._updates[update.update_id] = update
        wanted = {
            path
            for update_id in self._updates
            for path in (self.path(update_id), self._record(update_id))
        }
        for path in folder.iterdir():
            if path not in wanted:
                path.unlink(missing_ok=True)

    def path(self, update_id: str) -> Path:
        """Return the path of an update's file: a hash, since an id may contain any characters."""
        return self._folder / f"{_file_name(update_id)}.safetensors"

    def keep(self, update: KeptUpdate) -> None:
        """Record an update whose file has been written. Raises StorageError."""
        write_atomically(self._record(update.update_id), update.model_dump_json())
        self._updates[update.update_id] = update

    def find(self, update_id: str) -> KeptUpdate | None:
        """Return the update with this id; None if there is none."""
        return self._updates.get(update_id)

    def drop(self, update_id: str) -> None:
        """Delete an update; do nothing if there is none."""
        self._updates.pop(update_id, None)
        self._record(update_id).unlink(missing_ok=True)
        self.spare.give(self.path(update_id))

    def drop_rounds(self, *, run_id: str, client_id: str, through: int) -> None:
        """Delete a client's updates for a run's rounds up to `through`, inclusive."""
        for update in list(self._updates.values()):
            if (update.run_id, update.client_id) == (run_id, client_id) and update.round <= through:
                self.drop(update.update_id)

    def drop_expired(self, *, now: float) -> None:
        """Delete updates that expired at least `KEEP_AFTER_DEADLINE_SECONDS` ago."""
        for update in list(self._updates.values()):
            if update.expires + KEEP_AFTER_DEADLINE_SECONDS <= now:
                self.drop(update.update_id)

    def drop_others(self, run_id: str, client_id: str, *, update_id: str) -> None:
        """Delete a client's updates for a run, except the one with this id."""
        for update in list(self._updates.values()):
            whose = (update.run_id, update.client_id)
            if whose == (run_id, client_id) and update.update_id != update_id:
                self.drop(update.update_id)

    def _record(self, update_id: str) -> Path:
        return self._folder / f"{_file_name(update_id)}.json"


def _file_name(update_id: str) -> str:
    return hashlib.sha256(update_id.encode()).hexdigest()[:40]


def _read(record: Path) -> KeptUpdate | None:
    try:
        return KeptUpdate.model_validate_json(record.read_bytes())
    except (OSError, ValidationError):
        return None


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
