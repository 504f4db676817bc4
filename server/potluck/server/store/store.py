"""The coordinator's store: all data that must survive a kill."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import TypeVar

from sqlalchemy import delete, select

from potluck.server.store.attempt_table import Attempts
from potluck.server.store.client_table import Clients, Profiles, Sums
from potluck.server.store.file_references import References
from potluck.server.store.late_table import LateTrainings
from potluck.server.store.migrations import MIGRATIONS, Migration, migrate
from potluck.server.store.part import Part
from potluck.server.store.round_copies import RoundCopies
from potluck.server.store.round_table import Rounds
from potluck.server.store.run_table import Runs
from potluck.server.store.sql import schema
from potluck.server.store.sql.database import Database

# Deletion -----------------------------------------------------------------------------------------

OF_RUNS = (
    schema.late_updates,
    schema.exchanges,
    schema.members,
    schema.rounds,
    schema.attempts,
    schema.participation,
    schema.left_out,
    schema.roster,
    schema.runs,
)
"""The tables whose rows belong to one run. Each table comes before the tables that it references,
so rows can be deleted in this order."""


class Deletions(Part):
    """Deletes runs from the store."""

    def delete_runs(self, run_ids: Collection[str]) -> set[str]:
        """Delete all rows of these runs; ignore unknown ids.

        Profiles and secure sums are kept as records of disclosures. Returns the digests of the
        files that the runs referenced; other runs may reference them too.
        """
        runs, rounds = schema.runs, schema.rounds
        named = [
            select(rounds.c.model_blake3).where(rounds.c.run_id.in_(run_ids)),
            select(rounds.c.state_blake3).where(rounds.c.run_id.in_(run_ids)),
            select(runs.c.initial_model_blake3).where(runs.c.run_id.in_(run_ids)),
        ]
        with self._database.transaction() as connection:
            found = {digest for query in named for digest in connection.execute(query).scalars()}
            for table in OF_RUNS:
                connection.execute(delete(table).where(table.c.run_id.in_(run_ids)))
        return {str(digest) for digest in found if digest is not None}


# The store ----------------------------------------------------------------------------------------

T = TypeVar("T")


class Store(
    Runs,
    Deletions,
    Attempts,
    Rounds,
    RoundCopies,
    LateTrainings,
    References,
    Clients,
    Profiles,
    Sums,
):
    """Runs, attempts, rounds, clients, profiles and secure sums in one database.

    When a method returns, its changes are on disk; if it raises, nothing has changed. Methods
    block; call them from one thread at a time. In addition to the errors named, every method raises
    StorageError if the database fails or has an invalid row.
    """

    @classmethod
    def open(cls, url: str, *, migrations: Sequence[Migration] = MIGRATIONS) -> Store:
        """Open a database, lock it, check it and bring its schema up to date.

        url: `sqlite:////path/to/file` (created if missing; its directory must exist) or
        `postgresql+psycopg://user@host/name`. Raises ConfigurationError for any other URL. Raises
        StorageError if another coordinator uses the database, or if it is damaged, newer than this
        software or not Potluck's.
        """
        database = Database.open(url)
        try:
            with database.transaction() as connection:
                version = migrate(connection, database.name, migrations)
        except BaseException:
            database.close()
            raise
        database.version = version
        return cls(database)

    def patiently(self, call: Callable[[Store], T]) -> T:
        """Call a function with this store; repeat the call while the database is unreachable.

        The function must be repeatable: it must make only one change, at its end, or changes that
        may be made twice. Other errors of the function are raised.
        """
        return self._database.patiently(lambda: call(self))

    def give_up(self) -> None:
        """Stop waiting for an unreachable database. Thread-safe."""
        self._database.give_up()

    def watch(
        self,
        tell_away: Callable[[str], None],
        tell_damaged: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Set functions that are called, from any thread, when the database's state changes.

        tell_away: called with the reason when the database becomes unreachable, and with "" when it
        is reachable again.

        tell_damaged: called with the reason if the database is found to be damaged.
        """
        self._database.tell_away = tell_away
        self._database.tell_damaged = tell_damaged

    def look(self) -> None:
        """Check whether the database is damaged; see `watch`. Thread-safe."""
        self._database.look()

    def checkpoint(self) -> bool:
        """Ensure that damage to the database's log can't undo the current content.

        Call this before files are deleted that older rows reference. Return False if another
        program reads the database now, which prevents it. Raises StorageError.
        """
        return self._database.checkpoint()

    def check(self) -> None:
        """Read the whole database. Raises DamagedDatabaseError if it is damaged."""
        self._database.check()

    @property
    def name(self) -> str:
        """Name of the database for messages, without its password."""
        return self._database.name

    def close(self) -> None:
        """Disconnect from the database; safe to call twice."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
