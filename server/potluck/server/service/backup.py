"""Makes a backup of a coordinator, even while the coordinator commits rounds.

First, it copies a snapshot of the database; then it copies the model files that the snapshot's rows
reference, and all other files. No model file is deleted meanwhile, see `store/file_hold.py`. A sink
may write to its own SQLite database meanwhile, so a snapshot of it is copied too.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pydantic import ValidationError

from potluck.common.disk import sync_path
from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.net.build_version import software_version
from potluck.common.process.folder_lock import NAME as LOCK
from potluck.server.clock import utc
from potluck.server.config import CoordinatorConfig
from potluck.server.service.backup_files import (
    DUMP,
    LIST,
    SQLITE,
    STATE,
    BackupList,
    copy,
    digest_of,
    disk_errors_of,
    dump,
)
from potluck.server.service.restore import check_not_interrupted
from potluck.server.service.state_folders import MODELS
from potluck.server.store.file_hold import held
from potluck.server.store.file_references import References
from potluck.server.store.model_files import NAME, ModelVersion
from potluck.server.store.recorded_commits import JOURNAL
from potluck.server.store.round_table import Rounds
from potluck.server.store.run_table import Runs
from potluck.server.store.sql.database import parse_url
from potluck.server.store.sql.failures import AFTER_DAMAGE, DamagedDatabaseError, storage_error
from potluck.server.store.sql.reading import open_for_reading

_BUSY_SECONDS = 30.0
_SQLITE_START = b"SQLite format 3\0"
_LOGS = ("-journal", "-wal", "-shm")
"""Ends of the names of the files that SQLite keeps beside a database."""


class _Named(References, Rounds, Runs):
    """Part of the store with the tables whose rows reference the needed files."""


@dataclass(frozen=True, kw_only=True)
class _Needed:
    """Model files to copy. named: digests that rows reference. last: for each run, digests of the
    files that it needs to continue."""

    named: set[str]
    last: dict[str, set[str]]


def back_up(config: CoordinatorConfig, folder: Path) -> Iterator[str]:
    """Make a backup in a new folder; yield lines to show to the operator.

    The folder appears only when the backup is complete. Raises ConfigurationError if the folder
    exists or is inside the state directory, StorageError if the database or a disk fails.
    """
    folder, state = folder.absolute(), config.state_directory.resolve()
    if folder.exists():
        raise ConfigurationError(f"{folder} already exists; name a new folder", path=folder)
    if folder.resolve().is_relative_to(state):
        raise ConfigurationError(
            f"{folder} is inside the state directory; name a folder outside it", path=folder
        )
    if not state.is_dir():
        raise ConfigurationError(
            f"{state} does not exist, so nothing can be backed up; check state_directory",
            path=state,
        )
    check_not_interrupted(state)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    with disk_errors_of(folder.parent), _removed_on_failure(partial):
        partial.mkdir(mode=0o700, parents=True)
        with held(state / MODELS):
            files = {}
            database, needed = _copy_database(config.database_url(), partial)
            files[database] = digest_of(partial / database)
            models = dict(_copy_models(state, partial, needed.named))
        files |= models
        files |= dict(_copy_others(config, state, partial))
        listed = BackupList(
            software=software_version(),
            created_at=utc().isoformat(timespec="seconds"),
            database=database,
            files=files,
        )
        (partial / LIST).write_text(listed.model_dump_json(indent=1))
        for each in (partial / LIST, partial):
            sync_path(each)
        partial.rename(folder)
        sync_path(folder.parent)
    yield f"{len(needed.last)} runs and {len(models)} model files are in {folder}"
    there = {Path(name).stem for name in models}
    for run_id, digests in needed.last.items():
        if digests - there:
            yield (
                f"warning: run {run_id} can't be resumed from this backup: the file of its last "
                f"round {min(digests - there)} is missing or damaged"
            )


@contextlib.contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _copy_database(url: str, target: Path) -> tuple[str, _Needed]:
    """Copy the database. Return the name of the copy, and the files that its rows reference."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        _copy_sqlite(Path(parsed.database or "").resolve(), target / SQLITE)
        return SQLITE, _needed(f"sqlite:///{target / SQLITE}")
    dump(url, target / DUMP)
    return DUMP, _needed(url)  # rows newer than the dump may name more files, which is harmless


def _copy_sqlite(source: Path, target: Path) -> None:
    """Copy a snapshot of an SQLite database, even while a coordinator writes to it."""
    try:
        with (
            contextlib.closing(_connected(source)) as original,
            contextlib.closing(sqlite3.connect(target)) as made,
        ):
            original.backup(made)
            # With this mode, the copy stays a single file, without a log file, even while it is
            # read.
            made.execute("PRAGMA journal_mode = DELETE")
            [damage] = made.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.Error as error:
        raise storage_error(error, str(source)) from error
    if damage != "ok":
        detail = " ".join(str(damage).split())
        raise DamagedDatabaseError(
            f"{source}: the file is damaged ({detail}); {AFTER_DAMAGE}", database=source
        )
    target.chmod(0o600)


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=_BUSY_SECONDS)


def _needed(url: str) -> _Needed:
    database = open_for_reading(url)
    tables = _Named(database)
    try:
        last = {}
        for row in tables.runs():
            committed = tables.last_round(row.run_id)
            state = None if committed is None else committed.state_blake3
            last[row.run_id] = {each for each in (row.model_blake3, state) if each is not None}
        return _Needed(named=tables.named_files(), last=last)
    finally:
        database.close()


def _copy_models(state: Path, target: Path, named: set[str]) -> Iterator[tuple[str, str]]:
    """Copy the existing files with these digests, and their lists of renditions.

    Yield the path and digest of each copy whose content matches its name.
    """
    models = state / MODELS
    wanted = set(named)
    for digest in named:
        with contextlib.suppress(FileNotFoundError, ValidationError):
            notes = (models / f"{digest}.json").read_text()
            wanted |= ModelVersion.model_validate_json(notes).digests
    for path in sorted(models.iterdir()):
        found = NAME.fullmatch(path.name)
        if found is None or found[1] not in wanted:
            continue
        name = f"{STATE}/{MODELS}/{path.name}"
        digest = copy(path, target / name)
        if found[2] == "safetensors" and digest != found[1]:
            (target / name).unlink()  # the source is damaged, so the copy is useless
            continue
        yield name, digest


def _copy_others(config: CoordinatorConfig, state: Path, target: Path) -> Iterator[tuple[str, str]]:
    """Copy all other files of the state directory that a coordinator needs. Yield the path and
    digest of each."""
    database = Path(parse_url(config.database_url()).database or "").resolve()
    left_out = {LOCK, JOURNAL, f"{MODELS}.hold", f"{JOURNAL}.new"}
    folders = {MODELS, f"{MODELS}.spare", "spool"}
    for path in sorted(state.rglob("*")):
        name = path.relative_to(state)
        if (
            name.parts[0] in folders
            or str(name) in left_out
            or any(part.startswith(".") for part in name.parts)
            or (path.parent == database.parent and path.name.startswith(database.name))
            or any(path.name.endswith(end) and _is_sqlite(_without(path, end)) for end in _LOGS)
        ):
            continue
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            if path.is_file():
                yield f"{STATE}/{name}", _copy_other(path, target / STATE / name)


def _copy_other(source: Path, target: Path) -> str:
    """Copy a file; return the digest of the copy. Of an SQLite database, such as a sink's, copy a
    snapshot: the sink may write to it meanwhile."""
    if _is_sqlite(source):
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            _copy_sqlite(source, target)
            return digest_of(target)
        except StorageError:  # it is damaged, or deleted meanwhile: copy its bytes
            target.unlink(missing_ok=True)
    return copy(source, target)


def _is_sqlite(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_SQLITE_START)) == _SQLITE_START
    return False


def _without(path: Path, end: str) -> Path:
    return path.with_name(path.name.removesuffix(end))
