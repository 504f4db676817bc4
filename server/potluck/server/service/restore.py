"""Restores a backup.

If the process is killed during a restore, either the old state is intact, or no coordinator starts
until the restore is repeated.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from potluck.common.disk import sync_path
from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.net.key_files import KEY_MODE, write_whole
from potluck.server.config import CoordinatorConfig
from potluck.server.service.backup_files import (
    DUMP,
    STATE,
    copy,
    digest_of,
    disk_errors_of,
    put_back,
    read_list,
    verify,
)
from potluck.server.service.state_folders import MODELS, locked_state
from potluck.server.store.recorded_commits import JOURNAL
from potluck.server.store.sql.database import locked_sqlite, parse_url

_MARK = "restoring"
"""Name of a file that exists in the state directory during a restore; it contains the path of the
backup."""


def check_not_interrupted(state: Path) -> None:
    """Raise StorageError if a restore was killed before its end."""
    try:
        backup = (state / _MARK).read_text()
    except OSError:
        return
    raise StorageError(
        f"{state}: the restore of {backup} was interrupted; repeat it with `potluck-server restore "
        f"{backup}`",
        path=state,
    )


def restore(config: CoordinatorConfig, folder: Path) -> Iterator[str]:
    """Replace the state by the state in a backup; yield lines to show to the operator.

    All files are verified first. Existing revocation lists, member lists and records are kept,
    because those in a backup can't be newer. Raises ConfigurationError while a coordinator uses the
    state directory, or if the folder is not a backup; StorageError if a file of the backup is
    damaged or a disk fails.
    """
    folder = folder.absolute()
    found, url = read_list(folder), config.database_url()
    is_dump = found.database == DUMP
    if is_dump != (parse_url(url).get_backend_name() == "postgresql"):
        kind = "PostgreSQL" if is_dump else "SQLite"
        raise ConfigurationError(
            f"{folder} is a backup of a {kind} database; set `database` in the configuration to a "
            f"{kind} URL",
            path=folder,
        )
    verify(folder, found)
    with locked_state(config), disk_errors_of(config.state_directory):
        state = config.state_directory.resolve()
        for name, digest in found.files.items():
            if name.startswith(f"{STATE}/"):
                _put(folder / name, state / name.removeprefix(f"{STATE}/"), digest)
        if is_dump:
            _mark(state, folder)
            put_back(url, folder / DUMP)
        else:
            path = Path(parse_url(url).database or "").resolve()
            with locked_sqlite(path):
                made = path.with_name(f"{path.name}.restored")
                copy(folder / found.database, made)
                _mark(state, folder)
                # delete the logs of the replaced database: SQLite would apply them to the restored
                # one
                for suffix in ("-wal", "-shm"):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
                made.replace(path)
                sync_path(path.parent)
        # Delete the journal and the spool: they contain rounds after the backup, which will be
        # repeated.
        (state / JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(state / "spool", ignore_errors=True)
        (state / _MARK).unlink()
        sync_path(state)
    models = sum(name.startswith(f"{STATE}/{MODELS}/") for name in found.files)
    yield f"{folder} of {found.created_at} is restored, with {models} model files"


def _mark(state: Path, folder: Path) -> None:
    write_whole(state / _MARK, str(folder).encode(), KEY_MODE)
    sync_path(state)


def _put(source: Path, target: Path, digest: str) -> None:
    """Copy a file if the target is missing, or if the target is a damaged model."""
    if target.exists() and (target.parent.name != MODELS or digest_of(target) == digest):
        return
    copy(source, target)
    sync_path(target.parent)
