"""States that clients store from one training to the next, and never send.

Examples are SCAFFOLD's control variates, and model tensors that stay with their client.

The states of a training are *pending* until the coordinator reports that the update became part of
a model. Then they are *committed*, and the earlier committed ones are deleted. The coordinator
reports this when it has committed a round, and again with the next training. So host and
coordinator agree even after a lost message or a killed process.

A record per run and client names the updates whose states are kept. It is replaced in one step,
after the files are written. Files of updates that no record names are deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from potluck.client.base.state_directory import KEPT, write_atomically
from potluck.common.errors import ConfigurationError, LayoutError, StateLostError
from potluck.common.tensors.layout import quoted
from potluck.common.tensors.stored_tensors import StoredTensors
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.common.updates.kept_states import PURPOSES

# States -------------------------------------------------------------------------------------------

KEPT_DAYS: Final = 90.0
"""Days after which unused states of a run are deleted: the run is then considered over."""


class _Record(BaseModel):
    """Ids of the updates whose states are stored, for one run and client; empty for none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    client_id: str
    committed: str = ""
    pending: str = ""


class KeptStates:
    """The files in a folder: one for each update and purpose. Not thread-safe; `path` may be called
    from any thread."""

    def __init__(self, folder: Path, *, now: float | None = None) -> None:
        """Read the records; delete damaged or old ones. `now`: seconds since 1970."""
        self._folder = folder
        self._records: dict[tuple[str, str], _Record] = {}
        oldest = (time.time() if now is None else now) - KEPT_DAYS * 86400.0
        wanted: set[str] = set()
        for path in sorted(folder.glob("*.json")):
            record = _read(path)
            if record is None or path.stat().st_mtime < oldest:
                continue
            self._records[record.run_id, record.client_id] = record
            ids = filter(None, (record.committed, record.pending))
            wanted |= {path.stem, *(_hashed(update_id) for update_id in ids)}
        for path in folder.iterdir():
            if path.name.partition(".")[0] not in wanted:
                path.unlink(missing_ok=True)

    def path(self, update_id: str, purpose: str) -> Path:
        """Return the path of a state that a training saved.

        The name is a hash, since an id and a purpose may contain any characters."""
        return _path(self._folder, update_id, purpose)

    def begin(
        self, run_id: str, client_id: str, included_update_id: str, purposes: Iterable[str]
    ) -> Mapping[str, Path]:
        """Begin a training; return the committed states by purpose, or {} if there are none yet.

        Pending states of another training are deleted. Arguments and errors are those of `find`.
        """
        found = self.find(run_id, client_id, included_update_id, purposes)
        self._replace(self._record(run_id, client_id), committed=included_update_id, pending="")
        return found

    def find(
        self, run_id: str, client_id: str, included_update_id: str, purposes: Iterable[str]
    ) -> Mapping[str, Path]:
        """Return the states of an update by purpose; {} if `included_update_id` is empty.

        `included_update_id`: the client's last update that became part of the model, as the
        coordinator recorded it. Raises StateLostError if its states are not on this host.
        """
        if not included_update_id:
            return {}
        record = self._record(run_id, client_id)
        paths = {purpose: self.path(included_update_id, purpose) for purpose in purposes}
        known = included_update_id in (record.committed, record.pending)
        lost = [purpose for purpose, path in paths.items() if not (known and path.is_file())]
        if lost:
            raise StateLostError(
                f"client '{client_id}' has lost the state '{lost[0][:40]}' of update "
                f"'{included_update_id}', because the host's state directory is missing or out "
                "of date. Restore the directory, or start a new run (with strategy.keeper = "
                '"coordinator", if the strategy has that option, for clients that may lose their '
                "disk)",
                client=client_id,
                update=included_update_id,
            )
        return paths

    def pend(self, run_id: str, client_id: str, update_id: str) -> None:
        """Note that the states of a training are at `path`, pending. Raises StorageError."""
        record = self._record(run_id, client_id)
        self._replace(record, committed=record.committed, pending=update_id)

    def settle(self, run_id: str, client_id: str, update_id: str, *, included: bool) -> None:
        """Record the end of an update's round. Raises StorageError.

        included: True if the update became part of the model.
        """
        record = self._record(run_id, client_id)
        if not record.pending or record.pending != update_id:
            return
        committed = update_id if included else record.committed
        self._replace(record, committed=committed, pending="")

    def discard(self, update_id: str) -> None:
        """Delete the states of a training that ended before they were pending."""
        for path in self._folder.glob(f"{_hashed(update_id)}.*"):
            path.unlink(missing_ok=True)

    def _record(self, run_id: str, client_id: str) -> _Record:
        found = self._records.get((run_id, client_id))
        return found or _Record(run_id=run_id, client_id=client_id)

    def _replace(self, record: _Record, *, committed: str, pending: str) -> None:
        following = record.model_copy(update={"committed": committed, "pending": pending})
        if following == record and (record.run_id, record.client_id) in self._records:
            return
        name = _hashed(f"{record.run_id}\n{record.client_id}")
        write_atomically(self._folder / f"{name}.json", following.model_dump_json())
        self._records[record.run_id, record.client_id] = following
        for update_id in {record.committed, record.pending} - {committed, pending, ""}:
            self.discard(update_id)


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A state of a client's last update that became part of a run's model.

    pending: True if the client also has a pending state, of a later update.
    """

    run_id: str
    client_id: str
    purpose: str
    update_id: str
    path: Path
    pending: bool


def saved_states(folder: Path) -> list[SavedState]:
    """Return the states in a folder of `KeptStates`, sorted by run and client; change nothing."""
    records = filter(None, (_read(path) for path in folder.glob("*.json")))
    found = [
        SavedState(
            run_id=record.run_id,
            client_id=record.client_id,
            purpose=purpose,
            update_id=record.committed,
            path=_path(folder, record.committed, purpose),
            pending=bool(record.pending),
        )
        for record in sorted(records, key=lambda each: (each.run_id, each.client_id))
        for purpose in sorted(PURPOSES)
    ]
    return [each for each in found if each.update_id and each.path.is_file()]


def _path(folder: Path, update_id: str, purpose: str) -> Path:
    return folder / f"{_hashed(update_id)}.{_hashed(purpose)[:16]}.safetensors"


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _read(path: Path) -> _Record | None:
    try:
        return _Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


# Whole models for owners --------------------------------------------------------------------------
# Only reads the host's files, so it can be used while the host runs.


def chosen_states(
    state_directory: Path,
    *,
    client: str | None = None,
    run: str | None = None,
    purpose: str | None = None,
) -> list[SavedState]:
    """Return the kept states in a state directory, sorted by run and client.

    The arguments are filters; None: no filter. run: prefix of the run's id.
    """
    return [
        state
        for state in saved_states(state_directory / KEPT)
        if client in (None, state.client_id)
        and purpose in (None, state.purpose)
        and (run is None or state.run_id.startswith(run))
    ]


def described(state: SavedState) -> str:
    """Return one line that describes a state."""
    later = "; the state of a later update is pending" if state.pending else ""
    size = state.path.stat().st_size
    return (
        f"{state.client_id}: {state.purpose}, of update {state.update_id}, {size} bytes, "
        f"{state.path}{later}"
    )


def write_whole(states: Sequence[SavedState], model: Path | None, output: Path) -> str:
    """Write a client's whole model: `model`, with some tensors replaced by those of a kept state.

    Without `model`, write the kept state alone.

    Returns a line that describes what was written. Raises ConfigurationError unless there is
    exactly one state, or if `output` exists; LayoutError if a tensor has another shape or type than
    the model's; StorageError.
    """
    if output.exists():
        raise ConfigurationError(f"{output} exists already; name another file", path=output)
    if len(states) != 1:
        of = ", ".join(f"{s.client_id} in {s.run_id} ({s.purpose})" for s in states[:3])
        raise ConfigurationError(
            f"{len(states)} states match{': ' if of else ''}{of}; select a single state by "
            "--client, --run and --purpose, as `potluck-client kept` lists them",
            states=len(states),
        )
    [state] = states
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(open_tensors(state.path))
        stored = dict(own.arrays.stored)
        if model is not None:
            whole = stack.enter_context(open_tensors(model))
            for name, tensor in own.layout.by_name.items():
                there = whole.layout.by_name.get(name)
                if there and (there.shape, there.dtype) != (tensor.shape, tensor.dtype):
                    raise LayoutError(
                        f"{model} is another model: its tensor {quoted(name)} has shape "
                        f"{there.shape}, but the client's tensor has shape {tensor.shape}",
                        path=model,
                    )
            stored = {**whole.arrays.stored, **stored}
        write_tensors(output, StoredTensors(stored), sync=True)
    what = f"{len(own.layout.tensors)} of them {state.client_id}'s own"
    return f"{output}: {len(stored)} tensors, {what}, of update {state.update_id}"


# Files of tasks -----------------------------------------------------------------------------------
# Each run and client has one folder; the trainer makes it if needed. Potluck neither sends nor
# reads its files, and does not restore them if a round fails.


class OwnFiles:
    """One folder per run and client, all within `path`. `folder` may be called from any thread."""

    def __init__(self, path: Path, *, now: float | None = None) -> None:
        """Delete folders that no training has used for `KEPT_DAYS`. `now`: seconds since 1970."""
        self._path = path
        oldest = (time.time() if now is None else now) - KEPT_DAYS * 86400.0
        for each in path.iterdir():
            if each.stat().st_mtime < oldest:
                shutil.rmtree(each, ignore_errors=True)

    def folder(self, run_id: str, client_id: str) -> Path:
        """Return a client's folder in a run, and mark it as used; it may not exist yet."""
        text = f"{run_id}\n{client_id}"
        folder = self._path / hashlib.sha256(text.encode()).hexdigest()[:40]
        if folder.is_dir():
            folder.touch()
        return folder
