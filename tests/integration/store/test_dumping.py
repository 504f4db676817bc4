"""Backups of a PostgreSQL, with its own programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.postgresql import PostgreSQL
from support.stored import RUN, begun_run, committed

from potluck.common.errors import StorageError
from potluck.common.net.tls import TlsFiles
from potluck.server.config import CoordinatorConfig
from potluck.server.service.backup import back_up
from potluck.server.service.backup_files import dump, put_back
from potluck.server.service.restore import restore
from potluck.server.store import AttemptKey, Store


def test_restoring_a_dump_gives_the_database_at_the_time_of_the_dump(
    postgresql: PostgreSQL, tmp_path: Path
) -> None:
    url, beside = postgresql.new_schema(), postgresql.new_schema()
    Store.open(beside).close()
    with Store.open(url) as store:
        begun_run(store)
        committed(store, AttemptKey(RUN.run_id, 1, 1))
        before = store.rounds(RUN.run_id)
        dump(url, tmp_path / "dump")  # also works while a coordinator uses it
        committed(store, AttemptKey(RUN.run_id, 2, 1))
    with Store.open(beside) as other:
        begun_run(other)
    put_back(url, tmp_path / "dump")
    with Store.open(url) as store:
        assert store.rounds(RUN.run_id) == before
    with Store.open(beside) as other:
        assert other.run(RUN.run_id).state, "tables of others stay"


def test_unreadable_dump_is_an_error_and_the_database_stays_unchanged(
    postgresql: PostgreSQL, tmp_path: Path
) -> None:
    url = postgresql.new_schema()
    (tmp_path / "dump").write_bytes(b"garbage")
    with Store.open(url) as store:
        begun_run(store)
    with pytest.raises(StorageError, match="pg_restore failed"):
        put_back(url, tmp_path / "dump")
    with Store.open(url) as store:
        assert store.run(RUN.run_id).state


def test_restored_postgresql_backup_names_runs_whose_model_is_missing(
    postgresql: PostgreSQL, tmp_path: Path
) -> None:
    url = postgresql.new_schema()
    tls = TlsFiles(certificate=tmp_path, key=tmp_path, authority=tmp_path)
    state = tmp_path / "coordinator"
    config = CoordinatorConfig(state_directory=state, database=url, tls=tls)
    (state / "models").mkdir(parents=True)
    (state / "revoked.pem").write_text("an older list")
    with Store.open(url) as store:
        begun_run(store)
        said = list(back_up(config, tmp_path / "backup"))
        committed(store, AttemptKey(RUN.run_id, 1, 1))
    assert said[0] == f"1 runs and 0 model files are in {tmp_path / 'backup'}"
    assert said[1].startswith(f"warning: run {RUN.run_id} can't be resumed from this backup: ")
    (state / "revoked.pem").write_text("a newer list")
    list(restore(config, tmp_path / "backup"))
    with Store.open(url) as store:
        assert store.run(RUN.run_id).committed_rounds == 0
    assert (state / "revoked.pem").read_text() == "a newer list"
