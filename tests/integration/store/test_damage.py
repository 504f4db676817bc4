"""Damaged files, damaged rows and full disks give one-line errors and lose no committed round."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from support.stored import AT, RUN, begun_run, committed, see_client

from potluck.common.errors import StorageError
from potluck.server.store import AttemptKey, Profile, Store

FIRST = AttemptKey(RUN.run_id, 1, 1)

FILL_THE_DISK = """
import subprocess, sys
from potluck.common.errors import StorageError
from potluck.server.store import AttemptKey, Store
from support.stored import RUN, begun_run, committed, see_client

room = sys.argv[1]
mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", room]
if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
    sys.exit(77)
url = f"sqlite:///{room}/potluck.db"
number = 0
with Store.open(url) as store:
    begun_run(store)
    try:
        while True:
            committed(store, AttemptKey(RUN.run_id, number + 1, 1))
            number += 1
    except StorageError as error:
        print(error.message)
    rounds = store.rounds(RUN.run_id)
    assert [row.key.round for row in rounds] == list(range(1, number + 1)), rounds
    assert number > 5, number
subprocess.run(["mount", "-o", "remount,size=4m", room], check=True)
with Store.open(url) as store:
    assert store.rounds(RUN.run_id) == rounds
    attempt = store.current_attempt(RUN.run_id)
    if attempt is not None:
        store.abandon_attempt(attempt.key, "the disk was full")
    last = store.last_attempt(RUN.run_id, number + 1)
    committed(store, AttemptKey(RUN.run_id, number + 1, last + 1))
    assert store.run(RUN.run_id).committed_rounds == number + 1
subprocess.run(["mount", "-o", "remount,ro", room], check=True)
try:
    Store.open(url)
except StorageError as error:
    print(error.message)
"""


def edit(url: str, *statements: str) -> None:
    """Run SQL statements that a coordinator never runs."""
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


@pytest.fixture
def filled(url: str) -> str:
    with Store.open(url) as store:
        begun_run(store)
        committed(store, FIRST)
        store.begin_attempt(AttemptKey(RUN.run_id, 2, 1), [0], AT)
        store.add_question(AttemptKey(RUN.run_id, 2, 1), 0, {"kind": "loss"})
        see_client(store)
        store.quarantine("a", "suspect", AT)
        profile = Profile(
            client_id="a",
            data_epoch=1,
            signal="triplet",
            parameters_json="{}",
            payload_json="[0.1, 0.2, 0.3]",
            signature=b"signed",
            received_at=AT,
        )
        store.put_profile(profile)
    return url


READS: dict[str, Callable[[Store], object]] = {
    "runs": lambda store: store.runs(),
    "roster": lambda store: store.roster(RUN.run_id),
    "attempts": lambda store: store.current_attempt(RUN.run_id),
    "exchanges": lambda store: store.current_attempt(RUN.run_id),
    "members": lambda store: store.rounds(RUN.run_id),
    "rounds": lambda store: store.last_round(RUN.run_id),
    "clients": lambda store: store.clients(),
    "quarantine": lambda store: store.quarantined(),
    "profiles": lambda store: store.profiles(),
}


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("runs", "state", "'sleeping'"),
        ("runs", "seed", "'many'"),
        ("runs", "created_at", "'yesterday'"),
        ("runs", "created_at", "'2026-01-01T00:00:00'"),
        ("attempts", "available", "'[[0,'"),
        ("attempts", "available", "'[0, 1]'"),
        ("exchanges", "question", "'['"),
        ("exchanges", "question", "'[]'"),
        ("exchanges", "answers", "'nothing'"),
        ("members", "state", "''"),
        ("rounds", "selector_scalars", "'{\"turn\": 1'"),
        ("rounds", "strategy_scalars", "'{\"turn\": [1]}'"),
        ("clients", "last_seen_at", "'2026-13-01T00:00:00+00:00'"),
        ("quarantine", "at", "''"),
        ("profiles", "payload_json", "'[0.1,'"),
        ("profiles", "signature", "'not hexadecimal'"),
    ],
)
def test_invalid_value_in_a_row_is_an_error_that_names_table_and_column(
    filled: str, table: str, column: str, value: str
) -> None:
    edit(filled, f"UPDATE {table} SET {column} = {value}")  # noqa: S608  # ours
    with Store.open(filled) as store:
        with pytest.raises(StorageError) as caught:
            READS[table](store)
        message = caught.value.message
        assert f"table {table}, " in message
        assert f"column {column}" in message
        assert "restore the database from a backup" in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("runs", "name"),
        ("roster", "client_id"),
        ("attempts", "begun_at"),
        ("attempts", "available"),
        ("exchanges", "question"),
        ("members", "host_id"),
        ("members", "size"),  # required if `blake3` is set
        ("rounds", "model_blake3"),
        ("rounds", "selector_scalars"),
        ("rounds", "seconds"),
        ("clients", "device"),
        ("profiles", "payload_json"),
    ],
)
def test_null_in_a_required_column_is_an_error_that_names_the_table(
    filled: str, table: str, column: str
) -> None:
    # A table without constraints accepts every value.
    edit(
        filled,
        f"CREATE TABLE copy AS SELECT * FROM {table}",  # noqa: S608  # ours
        f"ALTER TABLE {table} RENAME TO original",
        f"ALTER TABLE copy RENAME TO {table}",
        f"UPDATE {table} SET {column} = NULL",  # noqa: S608  # ours
    )
    with Store.open(filled) as store, pytest.raises(StorageError) as caught:
        READS[table](store)
    assert f"table {table}, " in caught.value.message
    assert "\n" not in caught.value.message


def test_roster_with_a_missing_row_is_refused(filled: str) -> None:
    edit(filled, "DELETE FROM roster WHERE client_id = 'b'")
    with Store.open(filled) as store, pytest.raises(StorageError, match="row 1 is missing"):
        store.roster(RUN.run_id)


@pytest.fixture
def file(sqlite_url: str) -> Path:
    """Return a database file with several pages and without a write-ahead log."""
    with Store.open(sqlite_url) as store:
        begun_run(store)
        for number in range(1, 30):
            committed(store, AttemptKey(RUN.run_id, number, 1))
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    assert [each.name for each in path.parent.iterdir() if each.name.endswith("-wal")] == []
    return path


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.9])
def test_a_truncated_file_is_refused(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(StorageError, match=r"damaged .*restore it from a backup") as caught:
        Store.open(f"sqlite:///{file}")
    assert str(file) in caught.value.message
    assert "\n" not in caught.value.message


def test_file_that_is_not_a_database_is_refused(file: Path) -> None:
    file.write_bytes(b"potluck" * 1000)
    with pytest.raises(StorageError, match="damaged or no database"):
        Store.open(f"sqlite:///{file}")


def test_database_with_zeroed_pages_is_refused(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(4096 * 3)
        opened.write(bytes(4096 * 4))
    with pytest.raises(StorageError, match="damaged"):
        Store.open(f"sqlite:///{file}")


def test_refused_database_file_can_be_replaced_in_the_same_process(file: Path) -> None:
    good = file.read_bytes()
    file.write_bytes(b"garbage" * 1000)
    with pytest.raises(StorageError):
        Store.open(f"sqlite:///{file}")
    file.write_bytes(good)
    with Store.open(f"sqlite:///{file}") as store:
        assert store.run(RUN.run_id).committed_rounds == 29


def test_full_or_read_only_disk_is_an_error_and_loses_no_committed_round(tmp_path: Path) -> None:
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    done = subprocess.run(
        [*apart, sys.executable, "-c", FILL_THE_DISK, str(tmp_path)],
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a disk of our own needs a user namespace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    full, read_only = done.stdout.splitlines()
    assert "the disk is full" in full
    assert "free some space" in full
    assert "Read-only file system" in read_only
