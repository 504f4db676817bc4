"""Opening a database: its lock, its permissions, its schema version and its migrations."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Float, Inspector, MetaData, create_engine, inspect, text
from sqlalchemy.types import TypeEngine
from support.postgresql import PostgreSQL
from support.repository import TESTDATA
from support.stored import (
    RUN,
    begun_run,
    see_client,
)

from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.net.build_version import software_version
from potluck.server.store import Store
from potluck.server.store.migrations import MIGRATIONS
from potluck.server.store.sql.schema import metadata

OPEN_AND_WAIT = """
import sys
from potluck.server.store import Store
with Store.open(sys.argv[1]):
    print("open", flush=True)
    sys.stdin.read()
"""


def run_sql(url: str, *statements: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def refused(url: str, **options: Any) -> str:
    """Return the one-line error with which a database is refused."""
    with pytest.raises(StorageError) as caught:
        Store.open(url, **options)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_stored_runs_are_read_after_reopening(url: str) -> None:
    with Store.open(url) as store:
        begun_run(store)
        before = store.runs()
    with Store.open(url) as store:
        assert store.runs() == before
        store.close()  # may be called twice


def test_second_store_on_one_database_in_one_process_is_refused(url: str) -> None:
    with Store.open(url):
        assert "in use by another coordinator" in refused(url)
    Store.open(url).close()


def test_database_that_another_process_holds_is_refused_until_it_ends(url: str) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", OPEN_AND_WAIT, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        message = refused(url)
        assert "in use by another coordinator" in message
        if url.startswith("sqlite"):
            assert f"process {other.pid}" in message
        other.kill()
    Store.open(url).close()


def test_symlink_to_a_database_shares_its_lock(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    with Store.open(f"sqlite:///{tmp_path}/real.db"):
        assert "in use" in refused(f"sqlite:///{tmp_path}/link.db")


def test_database_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/potluck.db") as store:
        store.add_run(RUN)
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(
        ["potluck.db", "potluck.db-wal", "potluck.db-shm", "potluck.db.lock"], 0o600
    )


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("potluck.db", "write sqlite:////"),
        ("sqlite://", "must contain only a file"),
        ("sqlite:///:memory:", "must contain only a file"),
        ("sqlite:///x.db?mode=ro", "must contain only a file"),
        ("mysql://user:hunter2@host/x", "'mysql' is not supported"),
        ("sqlite+aiosqlite:///x.db", "'sqlite\\+aiosqlite' is not supported"),
    ],
)
def test_invalid_database_url_is_refused_with_a_remedy(url: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint) as caught:
        Store.open(url)
    assert "hunter2" not in caught.value.message


def test_missing_database_directory_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    message = refused(f"sqlite:///{tmp_path}/no/potluck.db")
    assert f"{tmp_path}/no/potluck.db: can't be opened (No such file or directory)" in message


@pytest.mark.parametrize("rest", ["user:hunter2@/db?", "user@/db?password=hunter2&"])
def test_error_for_an_unreachable_server_omits_the_password(tmp_path: Path, rest: str) -> None:
    message = refused(f"postgresql://{rest}host={tmp_path}")
    assert "the connection failed" in message
    assert "hunter2" not in message


def test_unknown_database_is_an_error_that_names_it(postgresql: PostgreSQL) -> None:
    message = refused(postgresql.url("never-made"))
    assert "never-made" in message


# The schema ------------------------------------------------------------------------------------


def kind(column_type: TypeEngine[Any]) -> type[TypeEngine[Any]]:
    # In SQLite, DOUBLE and DOUBLE PRECISION are the same type.
    return Float if isinstance(column_type, Float) else type(column_type.as_generic())


def shape(inspector: Inspector, table: str) -> dict[str, object]:
    """Return the relevant properties of a table in the same form for every database."""
    columns = inspector.get_columns(table)
    return {
        "columns": {c["name"]: (kind(c["type"]), c["nullable"]) for c in columns},
        "key": inspector.get_pk_constraint(table)["constrained_columns"],
        "unique": sorted(u["column_names"] for u in inspector.get_unique_constraints(table)),
        "foreign": [
            (key["constrained_columns"], key["referred_table"], key["referred_columns"])
            for key in inspector.get_foreign_keys(table)
        ],
        "indexes": sorted(
            (str(index["name"]), tuple(index["column_names"]))
            for index in inspector.get_indexes(table)
            if not index.get("duplicates_constraint")
        ),
    }


def shapes(url: str, tables: MetaData) -> dict[str, dict[str, object]]:
    engine = create_engine(url)
    try:
        inspector = inspect(engine)
        return {table: shape(inspector, table) for table in tables.tables}
    finally:
        engine.dispose()


PINNED = ["f90b8fa9c019", "18a2c64eec4b", "569958974b6d", "c7b5c53d23c9", "6a3febf577ff"]
MORE = ["ALTER TABLE runs ADD COLUMN owner TEXT", "CREATE TABLE extra (x BIGINT)"]


def stored(url: str, column: str) -> object:
    """Return a column of the row that holds the database's version."""
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            query = f"SELECT {column} FROM potluck_schema_version"  # noqa: S608
            return connection.execute(text(query)).scalar_one()
    finally:
        engine.dispose()


def made_as_version(url: str, version: int, *further: str) -> None:
    """Create a database with the schema of an earlier version."""
    first = filter(None, (TESTDATA / "schema_1.sql").read_text().split(";\n"))
    steps = [statement for migration in MIGRATIONS[: version - 1] for statement in migration]
    number = f"INSERT INTO potluck_schema_version (version) VALUES ({version})"  # noqa: S608
    run_sql(url, *first, *steps, number, *further)


@pytest.mark.parametrize("version", range(1, 2 + len(MIGRATIONS)))
def test_database_of_any_schema_version_is_migrated_to_the_current_schema(
    url: str, another_url: str, version: int
) -> None:
    made_as_version(url, version)
    Store.open(url).close()
    Store.open(another_url).close()
    assert shapes(url, metadata) == shapes(another_url, metadata)


def test_released_schemas_and_migrations_are_unchanged() -> None:
    """Append changes to `MIGRATIONS` under a new number; digests of new ones may be added here."""
    schemas = [(TESTDATA / "schema_1.sql").read_text(), *map("; ".join, MIGRATIONS)]
    digests = [hashlib.sha256(schema.encode()).hexdigest()[:12] for schema in schemas]
    assert digests[: len(PINNED)] == PINNED


@pytest.mark.parametrize("version", [1, 1 + len(MIGRATIONS)])
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("ALTER TABLE runs RENAME COLUMN measures TO figures", "runs.measures is missing"),
        ("DROP TABLE quarantine", "quarantine.client_id is missing"),
    ],
)
def test_database_whose_columns_differ_from_its_schema_version_is_refused_unchanged(
    url: str, version: int, change: str, difference: str
) -> None:
    made_as_version(url, version, change)
    assert refused(url).endswith(
        f": its schema differs from version {version} of this build, {software_version()} "
        f"({difference}); start the build that made the database, an unknown build, or "
        "give the coordinator another database"
    )
    assert stored(url, "version") == version


def test_column_of_a_later_schema_version_is_named_in_the_error(url: str) -> None:
    made_as_version(url, 1, "ALTER TABLE rounds ADD COLUMN best_round BIGINT")
    assert "(rounds.best_round exists already)" in refused(url)


def test_unknown_column_is_refused_only_if_it_requires_a_value(url: str) -> None:
    Store.open(url).close()
    run_sql(url, "ALTER TABLE clients ADD COLUMN note TEXT")
    Store.open(url).close()
    run_sql(url, "DROP TABLE quarantine", "CREATE TABLE quarantine (client_id TEXT NOT NULL, "
            "reason TEXT NOT NULL, at TEXT NOT NULL, operator TEXT NOT NULL)")  # fmt: skip
    assert "(quarantine.operator is unknown to this build)" in refused(url)


def test_newer_database_is_refused_with_the_build_that_last_opened_it(url: str) -> None:
    Store.open(url).close()
    run_sql(url, "UPDATE potluck_schema_version SET version = 99, software = '0.2.0.dev7+gabc'")
    assert "schema version 99, of 0.2.0.dev7+gabc, is newer than" in refused(url)


def test_opening_a_database_records_the_build(url: str) -> None:
    made_as_version(url, 1 + len(MIGRATIONS))
    Store.open(url).close()
    assert stored(url, "software") == software_version()


def test_migration_keeps_existing_rows(url: str) -> None:
    with Store.open(url) as store:
        store.add_run(RUN)
        before = store.runs()
    for _ in range(2):  # the second time, nothing is left to do
        with Store.open(url, migrations=[*MIGRATIONS, MORE]) as store:
            assert store.runs() == before
    newest = 1 + len(MIGRATIONS)
    message = refused(url)
    ours = software_version()
    assert f"schema version {newest + 1}, of {ours}, is newer than the {newest} of this" in message


def test_migrations_that_a_database_already_has_are_not_repeated(url: str) -> None:
    Store.open(url, migrations=[*MIGRATIONS, MORE]).close()
    later = ["ALTER TABLE extra ADD COLUMN y TEXT"]
    # A new database has exactly the tables of `schema.py`.
    run_sql(url, "CREATE TABLE extra (x BIGINT)")
    Store.open(url, migrations=[*MIGRATIONS, MORE, later]).close()
    run_sql(url, "INSERT INTO extra (x, y) VALUES (1, 'there')")


def test_failed_migration_is_rolled_back(url: str) -> None:
    Store.open(url).close()
    broken = ["CREATE TABLE extra (x BIGINT)", "ALTER TABLE nowhere ADD COLUMN x TEXT"]
    assert "nowhere" in refused(url, migrations=[*MIGRATIONS, broken])
    with Store.open(url) as store:
        store.add_run(RUN)
    run_sql(url, "CREATE TABLE extra (x BIGINT)")


def test_database_of_other_software_is_refused_unchanged(url: str) -> None:
    run_sql(url, "CREATE TABLE recipes (name TEXT)")
    assert (
        "not a database of Potluck 0.1.0 or later, because it has the table 'recipes'"
        in refused(url)
    )
    run_sql(url, "INSERT INTO recipes VALUES ('soup')")


def test_database_of_a_development_version_is_refused_with_a_remedy(url: str) -> None:
    run_sql(url, "CREATE TABLE potluck_schema (version BIGINT)", "CREATE TABLE runs (name TEXT)")
    message = refused(url)
    assert "it has the table 'potluck_schema'; use a new database" in message


def test_store_reconnects_to_a_restarted_database_server(postgresql: PostgreSQL) -> None:
    with Store.open(postgresql.new_schema()) as store:
        store.add_run(RUN)
        postgresql.stop()
        try:
            with pytest.raises(StorageError, match="check the URL and that the server is up") as no:
                see_client(store)
            assert "\n" not in no.value.message
        finally:
            postgresql.start()
        see_client(store)
        assert [run.run_id for run in store.runs()] == [RUN.run_id]


def test_lock_file_holds_the_id_of_its_process(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/potluck.db"):
        assert (tmp_path / "potluck.db.lock").read_text() == f"{os.getpid()}\n"
