"""Rebuilds rows that a database has lost, from the records of committed rounds.

A round is restored if its own model, or the model of a later round, is on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from potluck.common.errors import NotFoundError, StorageError
from potluck.server.clock import utc
from potluck.server.config import CoordinatorConfig
from potluck.server.service.restore import check_not_interrupted
from potluck.server.service.state_folders import locked_state, models_folder
from potluck.server.store import Store
from potluck.server.store.model_files import ModelFiles
from potluck.server.store.recorded_commits import RECORDS
from potluck.server.store.round_copies import RoundRecords, Tables
from potluck.server.store.sql.database import parse_url
from potluck.server.store.sql.failures import DamagedDatabaseError

_LOGS = ("-wal", "-shm")


def rebuild(config: CoordinatorConfig) -> Iterator[str]:
    """Restore rounds that are recorded but not in the database; yield a line to show for each run.

    A damaged SQLite file is renamed and replaced by a new one. Raises ConfigurationError while a
    coordinator uses the state directory, StorageError if the database can't be used.
    """
    with locked_state(config):
        check_not_interrupted(config.state_directory)
        records = RoundRecords(config.state_directory / RECORDS)
        files = ModelFiles(models_folder(config))
        yield from _without_damage(config)
        with Store.open(config.database_url()) as store:
            yield from _put_back(store, records, files)


def _without_damage(config: CoordinatorConfig) -> Iterator[str]:
    """Rename a damaged SQLite file; yield a line to show if one was renamed."""
    url = config.database_url()
    try:
        with Store.open(url) as store:
            store.check()
    except DamagedDatabaseError as error:
        parsed = parse_url(url)
        if parsed.get_backend_name() != "sqlite":
            raise
        path = Path(parsed.database or "").resolve()
        aside = _free_name(path)
        path.replace(aside)
        for suffix in _LOGS:  # rename its logs, too: they would damage the new file
            log = path.with_name(path.name + suffix)
            if log.exists():
                log.replace(aside.with_name(aside.name + suffix))
        yield (
            f"{error.message.partition(';')[0]}; the file was renamed to {aside.name}, and a new "
            "file is created"
        )


def _free_name(path: Path) -> Path:
    number = 1
    while True:
        found = path.with_name(f"{path.name}.damaged-{number}")
        if not found.exists():
            return found
        number += 1


def _put_back(store: Store, records: RoundRecords, files: ModelFiles) -> Iterator[str]:
    committed, new = store.last_rounds(), not store.clients()
    newest: Tables = {}
    for run_id in _in_order(records):
        begin, last = committed.get(run_id, 0), records.rounds(run_id)[-1]
        if last <= begin:
            continue
        try:
            end = _last_with_files(records, files, run_id, after=begin)
            rounds = [records.read(run_id, number) for number in range(begin + 1, end + 1)]
            if run_id not in committed:
                store.put_run(_own_row(records, run_id), utc())
            for number, tables in enumerate(rounds, begin + 1):
                store.put_round(run_id, number, tables)
        except StorageError as error:
            yield f"run {run_id} is not rebuilt: {error.message}"
            continue
        newest = rounds[-1]
        rebuilt = f"rebuilt up to round {end}"
        store.end_put_back(run_id, f"{rebuilt}; `potluck resume {run_id}` continues it", utc())
        yield f"run {run_id} is {rebuilt}"
    if new:  # a new database has no quarantine yet: restore the recorded one
        store.put_quarantine(newest)


def _in_order(records: RoundRecords) -> list[str]:
    """Return the runs that have records, in the order in which they were started, as far as it is
    known."""
    numbers: dict[str, int] = {}
    for run_id in records.runs():
        if records.rounds(run_id):
            try:
                numbers[run_id] = int(_own_row(records, run_id)["number"])
            except StorageError:
                numbers[run_id] = 0  # a damaged record comes first; `_put_back` reports it
    return sorted(numbers, key=lambda run_id: numbers[run_id])


def _own_row(records: RoundRecords, run_id: str) -> Mapping[str, Any]:
    """Return a run's row in the table of runs, from its first record. Raises StorageError."""
    first = records.rounds(run_id)[0]
    for row in records.read(run_id, first).get("runs", ()):
        return row
    raise StorageError(
        f"the record of round {first} does not contain the row of the run; restore a backup"
    )


def _last_with_files(records: RoundRecords, files: ModelFiles, run_id: str, *, after: int) -> int:
    """Return a run's last recorded round whose files are on disk and intact. Raises
    StorageError."""
    for number in reversed(records.rounds(run_id)):
        if number <= after:
            break
        try:
            [row] = records.read(run_id, number)["rounds"]
            for blake3 in (row["model_blake3"], row["state_blake3"]):
                if blake3 is not None:
                    files.verify(blake3)
        except (NotFoundError, StorageError):
            continue
        return number
    raise StorageError(f"the disk has no model of the rounds after {after}; restore a backup")
