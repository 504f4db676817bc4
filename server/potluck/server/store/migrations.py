"""How the schema came to be: an ordered list of changes, each made once, in a transaction.

The SQL is plain enough to mean the same to SQLite and PostgreSQL, and is never edited once
released: a change of the schema is a new migration, and schema.py is made to match (a test
compares the two).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, inspect, text

from potluck.common.errors import StorageError


@dataclass(frozen=True, kw_only=True)
class Migration:
    """One change of the schema; its version is its place in the list, from 1."""

    summary: str
    statements: Sequence[str]


_FIRST = Migration(
    summary="runs, rosters, attempts, rounds, clients, profiles",
    statements=[
        """CREATE TABLE runs (
            run_id TEXT NOT NULL PRIMARY KEY,
            number BIGINT NOT NULL UNIQUE,
            name TEXT NOT NULL,
            run_file TEXT NOT NULL,
            created_at TEXT NOT NULL,
            rounds BIGINT NOT NULL,
            count BIGINT NOT NULL,
            seed TEXT NOT NULL,
            task TEXT NOT NULL,
            selector TEXT NOT NULL,
            strategy TEXT NOT NULL,
            state TEXT NOT NULL,
            reason TEXT NOT NULL,
            changed_at TEXT NOT NULL,
            initial_model_sha256 TEXT,
            initial_model_at TEXT
        )""",
        """CREATE TABLE roster (
            run_id TEXT NOT NULL REFERENCES runs (run_id),
            "row" BIGINT NOT NULL,
            client_id TEXT NOT NULL,
            PRIMARY KEY (run_id, "row"),
            UNIQUE (run_id, client_id)
        )""",
        """CREATE TABLE attempts (
            run_id TEXT NOT NULL REFERENCES runs (run_id),
            round BIGINT NOT NULL,
            attempt BIGINT NOT NULL,
            begun_at TEXT NOT NULL,
            available TEXT NOT NULL,
            state TEXT NOT NULL,
            reason TEXT NOT NULL,
            PRIMARY KEY (run_id, round, attempt)
        )""",
        """CREATE TABLE exchanges (
            run_id TEXT NOT NULL,
            round BIGINT NOT NULL,
            attempt BIGINT NOT NULL,
            step BIGINT NOT NULL,
            question TEXT NOT NULL,
            answers TEXT,
            PRIMARY KEY (run_id, round, attempt, step),
            FOREIGN KEY (run_id, round, attempt) REFERENCES attempts (run_id, round, attempt)
        )""",
        """CREATE TABLE members (
            run_id TEXT NOT NULL,
            round BIGINT NOT NULL,
            attempt BIGINT NOT NULL,
            position BIGINT NOT NULL,
            client_id TEXT NOT NULL,
            host_id TEXT NOT NULL,
            state TEXT NOT NULL,
            reason TEXT NOT NULL,
            trouble TEXT,
            sha256 TEXT,
            size BIGINT,
            encoding TEXT,
            delta BIGINT,
            compressed BIGINT,
            samples BIGINT,
            steps BIGINT,
            seconds DOUBLE PRECISION,
            loss DOUBLE PRECISION,
            PRIMARY KEY (run_id, round, attempt, position),
            UNIQUE (run_id, round, attempt, client_id),
            FOREIGN KEY (run_id, round, attempt) REFERENCES attempts (run_id, round, attempt)
        )""",
        "CREATE INDEX members_by_client ON members (client_id, state)",
        """CREATE TABLE rounds (
            run_id TEXT NOT NULL,
            round BIGINT NOT NULL,
            attempt BIGINT NOT NULL,
            model_sha256 TEXT NOT NULL,
            state_sha256 TEXT,
            selector_scalars TEXT NOT NULL,
            strategy_scalars TEXT NOT NULL,
            loss DOUBLE PRECISION,
            accuracy DOUBLE PRECISION,
            worst_group_accuracy DOUBLE PRECISION,
            weighted_f1 DOUBLE PRECISION,
            seconds DOUBLE PRECISION NOT NULL,
            bytes_down BIGINT NOT NULL,
            bytes_up BIGINT NOT NULL,
            committed_at TEXT NOT NULL,
            PRIMARY KEY (run_id, round),
            FOREIGN KEY (run_id, round, attempt) REFERENCES attempts (run_id, round, attempt)
        )""",
        """CREATE TABLE clients (
            client_id TEXT NOT NULL PRIMARY KEY,
            host_id TEXT NOT NULL,
            device TEXT NOT NULL,
            first_seen_at TEXT NOT NULL,
            last_seen_at TEXT NOT NULL
        )""",
        """CREATE TABLE quarantine (
            client_id TEXT NOT NULL PRIMARY KEY,
            reason TEXT NOT NULL,
            at TEXT NOT NULL
        )""",
        """CREATE TABLE profiles (
            signal TEXT NOT NULL,
            client_id TEXT NOT NULL,
            data_epoch BIGINT NOT NULL,
            parameters_json TEXT NOT NULL,
            payload_json TEXT NOT NULL,
            signature TEXT,
            received_at TEXT NOT NULL,
            PRIMARY KEY (signal, client_id, data_epoch, parameters_json)
        )""",
    ],
)

_NORMALIZERS = Migration(
    summary="what a client's local steps amount to",
    statements=["ALTER TABLE members ADD COLUMN normalizer DOUBLE PRECISION"],
)

_REPORTS = Migration(
    summary="what clients report with their updates",
    statements=["ALTER TABLE members ADD COLUMN reports TEXT"],
)

_SUMS = Migration(
    summary="secure sums",
    statements=[
        """CREATE TABLE query_log (
            number BIGINT NOT NULL PRIMARY KEY,
            session_id TEXT NOT NULL UNIQUE,
            entry TEXT NOT NULL
        )""",
        """CREATE TABLE secure_sums (
            number BIGINT NOT NULL PRIMARY KEY,
            session_id TEXT NOT NULL UNIQUE,
            run_id TEXT NOT NULL,
            kind TEXT NOT NULL,
            task TEXT NOT NULL,
            epochs TEXT NOT NULL,
            record TEXT NOT NULL,
            total TEXT
        )""",
    ],
)

_QUOTAS = Migration(
    summary="how many samples of a class a member trains on at most",
    statements=["ALTER TABLE members ADD COLUMN quotas TEXT"],
)

_DIGESTS = Migration(
    summary="digests are BLAKE3's",
    statements=[
        "ALTER TABLE runs RENAME COLUMN initial_model_sha256 TO initial_model_blake3",
        "ALTER TABLE members RENAME COLUMN sha256 TO blake3",
        "ALTER TABLE rounds RENAME COLUMN model_sha256 TO model_blake3",
        "ALTER TABLE rounds RENAME COLUMN state_sha256 TO state_blake3",
    ],
)

_PARTICIPATION = Migration(
    summary="what a run remembers of each client; who names a file",
    statements=[
        """CREATE TABLE participation (
            run_id TEXT NOT NULL REFERENCES runs (run_id),
            client_id TEXT NOT NULL,
            picks BIGINT NOT NULL,
            samples BIGINT,
            included_round BIGINT,
            included_attempt BIGINT,
            PRIMARY KEY (run_id, client_id)
        )""",
        """INSERT INTO participation (run_id, client_id, picks, included_round)
            SELECT members.run_id, members.client_id, count(*),
                max(CASE WHEN members.state = 'included' THEN members.round END)
            FROM members JOIN rounds
                ON rounds.run_id = members.run_id AND rounds.round = members.round
                AND rounds.attempt = members.attempt
            GROUP BY members.run_id, members.client_id""",
        """UPDATE participation SET
            included_attempt = (SELECT rounds.attempt FROM rounds
                WHERE rounds.run_id = participation.run_id
                AND rounds.round = participation.included_round),
            samples = (SELECT nullif(members.samples, 0) FROM members JOIN rounds
                ON rounds.run_id = members.run_id AND rounds.round = members.round
                AND rounds.attempt = members.attempt
                WHERE rounds.run_id = participation.run_id
                AND rounds.round = participation.included_round
                AND members.client_id = participation.client_id)""",
        "CREATE INDEX rounds_by_model ON rounds (model_blake3)",
        "CREATE INDEX rounds_by_state_file ON rounds (state_blake3)",
        "CREATE INDEX runs_by_initial_model ON runs (initial_model_blake3)",
        "CREATE INDEX runs_by_state ON runs (state)",
    ],
)

_LEFT_OUT = Migration(
    summary="clients that can't take part in a run, and attempts that don't count",
    statements=[
        """CREATE TABLE left_out (
            run_id TEXT NOT NULL REFERENCES runs (run_id),
            client_id TEXT NOT NULL,
            process_id TEXT NOT NULL,
            trouble TEXT NOT NULL,
            at TEXT NOT NULL,
            PRIMARY KEY (run_id, client_id)
        )""",
        "ALTER TABLE attempts ADD COLUMN spent BIGINT NOT NULL DEFAULT 0",
    ],
)

MIGRATIONS: Sequence[Migration] = (
    _FIRST,
    _NORMALIZERS,
    _REPORTS,
    _SUMS,
    _QUOTAS,
    _DIGESTS,
    _PARTICIPATION,
    _LEFT_OUT,
)

_VERSIONS = "potluck_schema"


def migrate(
    connection: Connection, database: str, migrations: Sequence[Migration] = MIGRATIONS
) -> int:
    """Bring a database up to date within the caller's transaction; returns the new version.

    Raises StorageError where it is newer than the migrations, or belongs to other software.
    """
    tables = inspect(connection).get_table_names()
    if _VERSIONS not in tables:
        if tables:
            raise StorageError(
                f"{database}: not a Potluck database, it holds the table {min(tables)!r}; "
                "give the coordinator one of its own",
                database=database,
            )
        connection.execute(
            text(f"CREATE TABLE {_VERSIONS} (version BIGINT PRIMARY KEY, summary TEXT NOT NULL)")
        )
    version = connection.execute(
        text(f"SELECT coalesce(max(version), 0) FROM {_VERSIONS}")  # noqa: S608  # a constant
    ).scalar_one()
    if version > len(migrations):
        raise StorageError(
            f"{database}: schema version {version} is newer than this software's "
            f"{len(migrations)}; upgrade Potluck, or give the coordinator another database",
            database=database,
            version=version,
        )
    for number in range(version + 1, len(migrations) + 1):
        migration = migrations[number - 1]
        for statement in migration.statements:
            connection.execute(text(statement))
        connection.execute(
            text(f"INSERT INTO {_VERSIONS} VALUES (:version, :summary)"),  # noqa: S608  # a constant
            {"version": number, "summary": migration.summary},
        )
    return len(migrations)
