"""The coordinator's memory: everything it must still know after a kill."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from potluck.server.store.attempts import Attempts
from potluck.server.store.clients import Clients
from potluck.server.store.database import Database
from potluck.server.store.left_out import LeftOut
from potluck.server.store.migrations import MIGRATIONS, Migration, migrate
from potluck.server.store.profiles import Profiles
from potluck.server.store.references import References
from potluck.server.store.rounds import Rounds
from potluck.server.store.runs import Runs
from potluck.server.store.sums import Sums


class Store(Runs, Attempts, LeftOut, Rounds, References, Clients, Profiles, Sums):
    """Runs, attempts, rounds, clients, profiles and secure sums in one database.

    When a method returns, what it recorded is on disk; when it raises, nothing has changed.
    Methods block; call them from one thread at a time. Besides the errors that each names, any of
    them raises StorageError where the database fails or holds a row that can't be right.
    """

    @classmethod
    def open(cls, url: str, *, migrations: Sequence[Migration] = MIGRATIONS) -> Store:
        """Open a database, lock it, check it and bring its schema up to date.

        url: `sqlite:////path/to/file` (made if missing; its directory must exist) or
        `postgresql+psycopg://user@host/name`. Raises ConfigurationError for any other;
        StorageError where another coordinator has it, or it is damaged, newer than this software
        or not Potluck's.
        """
        database = Database.open(url)
        try:
            with database.transaction() as connection:
                migrate(connection, database.name, migrations)
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        """Let go of the database; safe to call twice."""
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
