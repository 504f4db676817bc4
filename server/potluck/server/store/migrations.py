"""The version of a database's schema, and the steps from one version to the next.

A new database gets the tables of `schema.py` directly. An older one gets the missing migrations,
all in one transaction. So every change of the schema is made in `schema.py` and as a migration; a
test compares the results.

A database whose schema does not match its version number is refused, because an unreleased build
created it, or it was changed by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, Inspector, insert, inspect, select, text, update

from potluck.common.errors import StorageError
from potluck.common.net.build_version import software_version
from potluck.server.store.sql.schema import metadata, schema_version

Migration = Sequence[str]
"""SQL statements with the same meaning in SQLite and PostgreSQL. Must not be edited after a
release."""

_BEST_MODELS: Migration = (
    "ALTER TABLE rounds ADD COLUMN best_measure TEXT",
    "ALTER TABLE rounds ADD COLUMN best_round BIGINT",
    "ALTER TABLE rounds ADD COLUMN best_value DOUBLE PRECISION",
    "ALTER TABLE rounds ADD COLUMN best_mark DOUBLE PRECISION",
    "ALTER TABLE rounds ADD COLUMN best_stalled BIGINT",
)
_PROVENANCE: Migration = (
    "ALTER TABLE rounds ADD COLUMN software TEXT",
    "ALTER TABLE members ADD COLUMN data_epoch BIGINT",
    "ALTER TABLE members ADD COLUMN software TEXT",
)
_COVERAGE: Migration = ("ALTER TABLE rounds ADD COLUMN coverage TEXT",)
_BUILD: Migration = ("ALTER TABLE potluck_schema_version ADD COLUMN software TEXT",)
_PRIVACY: Migration = ("ALTER TABLE rounds ADD COLUMN privacy TEXT",)
MIGRATIONS: Sequence[Migration] = (_BEST_MODELS, _PROVENANCE, _COVERAGE, _BUILD, _PRIVACY)
"""The migrations to versions 2, 3 and so on. Version 1 is the schema in
`tests/testdata/schema_1.sql`."""

_ADDS_COLUMN = re.compile(r"ALTER TABLE (\w+) ADD COLUMN (\w+)")
_ADDS_TABLE = re.compile(r"CREATE TABLE (\w+)")

Columns = Mapping[tuple[str, str], bool]
"""(table, column) → True if the column may be NULL."""


def migrate(
    connection: Connection, database: str, migrations: Sequence[Migration] = MIGRATIONS
) -> int:
    """Bring a database up to date within the caller's transaction; return its version.

    Raises StorageError if the database is newer than the migrations, if its columns are not those
    of its version, or if it belongs to other software.
    """
    newest = 1 + len(migrations)
    inspector = inspect(connection)
    tables = inspector.get_table_names()
    if not tables:
        metadata.create_all(connection, checkfirst=False)
        made = insert(schema_version).values(version=newest, software=software_version())
        connection.execute(made)
        return newest
    if schema_version.name not in tables:
        raise StorageError(
            f"{database}: not a database of Potluck 0.1.0 or later, because it has the "
            f"table {min(tables)!r}; use a new database",
            database=database,
        )
    there = _columns(inspector)
    version = connection.execute(select(schema_version.c.version)).scalar_one()
    build = _last_build(connection, there)
    if version > newest:
        raise StorageError(
            f"{database}: schema version {version}, of {build}, is newer than the {newest} of this "
            f"build, {software_version()}; upgrade Potluck, or give the coordinator another "
            "database",
            database=database,
            version=version,
        )
    missing = migrations[version - 1 :]
    difference = _difference(there, missing)
    if difference:
        raise StorageError(
            f"{database}: its schema differs from version {version} of this build, "
            f"{software_version()} ({difference}); start the build that made the database, "
            f"{build}, or give the coordinator another database",
            database=database,
            version=version,
        )
    for migration in missing:
        for statement in migration:
            connection.execute(text(statement))
    opened = update(schema_version).values(version=newest, software=software_version())
    connection.execute(opened)
    return newest


def _columns(inspector: Inspector) -> Columns:
    found = inspector.get_multi_columns()
    return {
        (table, str(column["name"])): bool(column["nullable"]) or column["default"] is not None
        for (_, table), columns in found.items()
        for column in columns
    }


def _last_build(connection: Connection, there: Columns) -> str:
    """Return a text that names the build that last opened the database."""
    software = None
    if (schema_version.name, "software") in there:
        software = connection.execute(select(schema_version.c.software)).scalar_one()
    return software or "an unknown build"


def _difference(there: Columns, migrations: Sequence[Migration]) -> str:
    """Return a text that names a missing or unexpected column; "" if there is none.

    there: the columns before these migrations. Additional columns that may be NULL are ignored.
    """
    statements = [statement for migration in migrations for statement in migration]
    added = {(found[1], found[2]) for found in map(_ADDS_COLUMN.match, statements) if found}
    made = {found[1] for found in map(_ADDS_TABLE.match, statements) if found}
    wanted = {
        (table.name, column.name): bool(column.nullable)
        for table in metadata.tables.values()
        for column in table.columns
    }
    for (table, column), optional in wanted.items():
        name = f"{table}.{column}"
        if table in made or (table, column) in added:
            if (table, column) in there:
                return f"{name} exists already"
        elif (table, column) not in there:
            return f"{name} is missing"
        elif optional and not there[table, column]:
            return f"{name} must not be empty in the database"
    tables = {table for table, _ in wanted}
    for table, column in sorted(there.keys() - wanted.keys()):
        if table in tables and not there[table, column]:
            return f"{table}.{column} is unknown to this build"
    return ""
