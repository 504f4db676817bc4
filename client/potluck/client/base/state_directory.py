"""The folder for data of a client process that must survive a restart.

lock                     held while the process runs
models/BLAKE3            models, named by the digest of the float32 file
fetched/BLAKE3[.part]    files being downloaded
updates/…                updates until their round is over; see `saved_updates`
kept/…                   states that clients keep between trainings; see `saved_states`
trainers/RUN-CLIENT/      files of tasks' own trainers; see `OwnFiles`
….spare/N                a model and an update that may be overwritten; see `spare_files`
disclosures/CLIENT.json  a client's releases, never deleted; see `release_ledger`
privacy/CLIENT.jsonl     a client's trainings with noise, never deleted; see `privacy_ledger`
sums/CLIENT.jsonl        a client's secure sums, never deleted; see `sum_ledger`
choices/…json            choices that the host made by measuring; see `kept_choices`
selections/…jsonl        documents of selections that coordinators committed to
outgoing/CLIENT.jsonl    a client's other messages: answers, counts, updates; `outgoing_log`
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from potluck.common.disk import sync_path
from potluck.common.errors import StorageError
from potluck.common.names import is_name
from potluck.common.process.folder_lock import FolderLock

KEPT = "kept"
"""Subfolder for the states that clients store between trainings."""

DISCLOSURES = "disclosures"
"""Subfolder for the ledgers of releases."""

SUMS = "sums"
"""Subfolder for the ledgers of secure sums."""

PRIVACY = "privacy"
"""Subfolder for the ledgers of trainings with noise."""

OUTGOING = "outgoing"
"""Subfolder for the logs of all other sent messages."""


class StateDirectory:
    """An open state directory, held by this process alone."""

    def __init__(self, path: Path) -> None:
        """Make the folder if it is missing, and lock it.

        Raises ConfigurationError if another process holds it, StorageError if the disk fails.
        """
        self.path = path
        self.models = path / "models"
        self.fetched = path / "fetched"
        self.updates = path / "updates"
        self.kept = path / KEPT
        self.trainers = path / "trainers"
        self.disclosures = path / DISCLOSURES
        self.privacy = path / PRIVACY
        self.sums = path / SUMS
        self.outgoing = path / OUTGOING
        self.choices = path / "choices"
        try:
            inside = (self.models, self.fetched, self.updates, self.kept, self.trainers)
            ledgers = (self.disclosures, self.privacy, self.sums)
            for folder in (path, *inside, *ledgers, self.outgoing):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.chmod(0o700)
        except OSError as error:
            raise StorageError(
                f"can't use the state directory {path}: {error.strerror}; "
                "set state_directory to a folder this user may write to",
                path=path,
            ) from error
        self._lock = FolderLock(
            path,
            holder="client process",
            remedy="stop that process, or give each process its own state_directory",
        )

    def close(self) -> None:
        """Release the lock, so that another process can use the folder."""
        self._lock.close()


def clients_with_files(folder: Path, suffix: str) -> list[str]:
    """Return the clients that have a file CLIENT`suffix` in a folder, sorted.

    Returns [] if the folder does not exist.
    """
    try:
        names = [path.stem for path in folder.glob(f"*{suffix}")]
    except OSError:
        return []
    return sorted(name for name in names if is_name(name))


def write_atomically(path: Path, text: str) -> None:
    """Write a small file, whole or not at all. Raises StorageError."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(path, error) from error


def write_durably(path: Path, text: str) -> None:
    """Write a small file, whole or not at all, synced to disk with its name. Raises StorageError;
    nothing has changed then."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_path(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(path, error) from error


def storage_error(path: Path, error: OSError) -> StorageError:
    """Return a one-line error for a failed disk operation, with the free space."""
    try:
        room = f"; the disk has {shutil.disk_usage(path.parent).free} free bytes"
    except OSError:
        room = ""
    return StorageError(f"can't write {path}: {error.strerror}{room}", path=path)
