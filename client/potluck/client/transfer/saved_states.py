"""State that clients keep from one training to the next (SCAFFOLD's control variates, for example).

The state of a training is *pending* until the coordinator says that the update became part of a
model; then it is *committed*, and the one committed before is deleted. The coordinator says so when
it has committed a round, and again with the next training: so neither a lost message nor a kill on
either side makes the two disagree.

A record per run and client names the files; it is replaced in one step, after its files are
there. Files that no record names are deleted.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from potluck.client.base.state_directory import write_atomically
from potluck.common.errors import StateLostError

KEPT_DAYS: Final = 90.0
"""A run that asks for nothing for longer is taken to be over."""


class _Record(BaseModel):
    """Updates by id, of which something is kept; empty for none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    client_id: str
    committed: str = ""
    pending: str = ""


class KeptStates:
    """The files in a folder. Not thread-safe; `path` may be called from any thread."""

    def __init__(self, folder: Path, *, now: float | None = None) -> None:
        """Read the records; what is broken or old is deleted. `now`: seconds since 1970."""
        self._folder = folder
        self._records: dict[tuple[str, str], _Record] = {}
        oldest = (time.time() if now is None else now) - KEPT_DAYS * 86400.0
        wanted: set[Path] = set()
        for path in sorted(folder.glob("*.json")):
            record = _read(path)
            if record is None or path.stat().st_mtime < oldest:
                continue
            self._records[record.run_id, record.client_id] = record
            ids = filter(None, (record.committed, record.pending))
            wanted |= {path, *(self.path(update_id) for update_id in ids)}
        for path in folder.iterdir():
            if path not in wanted:
                path.unlink(missing_ok=True)

    def path(self, update_id: str) -> Path:
        """Path of the state saved by a training. An id may hold anything; its hash may not."""
        return self._folder / f"{_hashed(update_id)}.safetensors"

    def begin(self, run_id: str, client_id: str, included_update_id: str) -> Path | None:
        """Begin a training: the file of the committed state, None where there is none yet.

        `included_update_id`: the client's last update that became part of the run's model, as the
        coordinator has it. Raises StateLostError where what was kept of that one is not here.
        """
        record = self._records.get((run_id, client_id), _Record(run_id=run_id, client_id=client_id))
        found = included_update_id in (record.committed, record.pending)
        if included_update_id and not (found and self.path(included_update_id).is_file()):
            raise StateLostError(
                f"client '{client_id}' has lost what it kept of update '{included_update_id}': "
                "its state directory is gone or of another time. Restore it, or start the run "
                'anew with strategy.keeper = "coordinator", for clients that may lose their disk',
                client=client_id,
                update=included_update_id,
            )
        self._replace(record, committed=included_update_id, pending="")
        return self.path(included_update_id) if included_update_id else None

    def pend(self, run_id: str, client_id: str, update_id: str) -> None:
        """Note that the state of a training is at `path`, pending. Raises StorageError."""
        record = self._records.get((run_id, client_id), _Record(run_id=run_id, client_id=client_id))
        self._replace(record, committed=record.committed, pending=update_id)

    def settle(self, run_id: str, client_id: str, update_id: str, *, included: bool) -> None:
        """Note that the round of an update is over, with it or without. Raises StorageError."""
        record = self._records.get((run_id, client_id))
        if record is None or record.pending != update_id:
            return
        committed = update_id if included else record.committed
        self._replace(record, committed=committed, pending="")

    def _replace(self, record: _Record, *, committed: str, pending: str) -> None:
        following = record.model_copy(update={"committed": committed, "pending": pending})
        if following == record and (record.run_id, record.client_id) in self._records:
            return
        name = _hashed(f"{record.run_id}\n{record.client_id}")
        write_atomically(self._folder / f"{name}.json", following.model_dump_json())
        self._records[record.run_id, record.client_id] = following
        for update_id in {record.committed, record.pending} - {committed, pending, ""}:
            self.path(update_id).unlink(missing_ok=True)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _read(path: Path) -> _Record | None:
    try:
        return _Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
