"""The version of a database's schema, and the steps from one version to the next.

A new database gets the tables of `schema.py` as they are. An older one gets the migrations that it
lacks, all in one transaction. So a change of the schema is made in both places; a test compares
what comes of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, insert, inspect, select, text, update

from potluck.common.errors import StorageError
from potluck.server.store.sql.schema import metadata, schema_version

Migration = Sequence[str]
"""SQL statements that mean the same to SQLite and PostgreSQL. Never edited once released."""

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
MIGRATIONS: Sequence[Migration] = (_BEST_MODELS, _PROVENANCE, _COVERAGE)
"""Those to versions 2, 3 and so on. Version 1 is the schema of release 0.1.0."""


def migrate(
    connection: Connection, database: str, migrations: Sequence[Migration] = MIGRATIONS
) -> int:
    """Bring a database up to date within the caller's transaction; returns its version.

    Raises StorageError where it is newer than the migrations, or belongs to other software.
    """
    newest = 1 + len(migrations)
    tables = inspect(connection).get_table_names()
    if not tables:
        metadata.create_all(connection, checkfirst=False)
        connection.execute(insert(schema_version).values(version=newest))
        return newest
    if schema_version.name not in tables:
        raise StorageError(
            f"{database}: not a database of Potluck 0.1.0 or later, it holds the table "
            f"{min(tables)!r}; give the coordinator a new one",
            database=database,
        )
    version = connection.execute(select(schema_version.c.version)).scalar_one()
    if version > newest:
        raise StorageError(
            f"{database}: schema version {version} is newer than this software's {newest}; "
            "upgrade Potluck, or give the coordinator another database",
            database=database,
            version=version,
        )
    for migration in migrations[version - 1 :]:
        for statement in migration:
            connection.execute(text(statement))
    connection.execute(update(schema_version).values(version=newest))
    return newest
