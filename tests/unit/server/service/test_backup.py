"""Backups of a state directory: the files beside the coordinator's database and models."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from potluck.common.net.tls import TlsFiles
from potluck.server.config import CoordinatorConfig
from potluck.server.service.backup import back_up
from potluck.server.store import Store


@pytest.fixture
def config(tmp_path: Path) -> CoordinatorConfig:
    tls = TlsFiles(certificate=tmp_path, key=tmp_path, authority=tmp_path)
    config = CoordinatorConfig(state_directory=tmp_path / "state", tls=tls)
    (config.state_directory / "models").mkdir(parents=True)
    (config.state_directory / "sinks" / "mlflow").mkdir(parents=True)
    Store.open(config.database_url()).close()
    return config


@pytest.mark.parametrize("journal", ["WAL", "PERSIST"])
def test_backup_contains_a_snapshot_of_a_database_that_a_sink_uses(
    config: CoordinatorConfig, tmp_path: Path, journal: str
) -> None:
    database = config.state_directory / "sinks" / "mlflow" / "mlflow.db"
    with contextlib.closing(sqlite3.connect(database)) as used:
        used.execute(f"PRAGMA journal_mode = {journal}")
        used.execute("CREATE TABLE metrics (step)")
        used.executemany("INSERT INTO metrics VALUES (?)", [(step,) for step in range(1000)])
        used.commit()
        assert len(list(database.parent.iterdir())) > 1
        list(back_up(config, tmp_path / "backup"))
    [copied] = (tmp_path / "backup" / "state" / "sinks" / "mlflow").iterdir()
    assert copied.name == "mlflow.db"
    with contextlib.closing(sqlite3.connect(copied)) as found:
        assert found.execute("SELECT count(*) FROM metrics").fetchone() == (1000,)


def test_backup_contains_the_bytes_of_a_damaged_database_of_a_sink(
    config: CoordinatorConfig, tmp_path: Path
) -> None:
    damaged = b"SQLite format 3\0" + b"damaged" * 100
    (config.state_directory / "sinks" / "mlflow" / "mlflow.db").write_bytes(damaged)
    (config.state_directory / "notes-wal").write_bytes(b"not SQLite's")
    list(back_up(config, tmp_path / "backup"))
    state = tmp_path / "backup" / "state"
    assert (state / "sinks" / "mlflow" / "mlflow.db").read_bytes() == damaged
    assert (state / "notes-wal").read_bytes() == b"not SQLite's"
