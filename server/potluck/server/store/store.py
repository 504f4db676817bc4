"""The coordinator's memory: everything it must still know after a kill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from potluck.server.store.attempt_table import Attempts
from potluck.server.store.client_table import Clients
from potluck.server.store.file_references import References
from potluck.server.store.late_table import LateTrainings
from potluck.server.store.migrations import MIGRATIONS, Migration, migrate
from potluck.server.store.profile_table import Profiles
from potluck.server.store.round_copies import RoundCopies
from potluck.server.store.round_table import Rounds
from potluck.server.store.run_deletion import Deletions
from potluck.server.store.run_table import Runs
from potluck.server.store.sql.database import Database
from potluck.server.store.sum_table import Sums

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

    When a method returns, its changes are on disk; when it raises, nothing has changed. Methods
    block; call them from one thread at a time. Besides the errors that each names, any of them
    raises StorageError if the database fails or holds an invalid row.
    """

    @classmethod
    def open(cls, url: str, *, migrations: Sequence[Migration] = MIGRATIONS) -> Store:
        """Open a database, lock it, check it and bring its schema up to date.

        url: `sqlite:////path/to/file` (made if missing; its directory must exist) or
        `postgresql+psycopg://user@host/name`. Raises ConfigurationError for any other; StorageError
        if another coordinator uses it, or if it is damaged, newer than this software or not
        Potluck's.
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
        """Call with this store, again as long as the database is away.

        A call that fails for that has changed nothing only if it makes one change, in the end, or
        may be made again. Raises what the call raises of other errors.
        """
        return self._database.patiently(lambda: call(self))

    def give_up(self) -> None:
        """Wait no more for a database that is away. May be called by any thread."""
        self._database.give_up()

    def watch(
        self,
        tell_away: Callable[[str], None],
        tell_damaged: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Set the callback for losses of the database: called in any thread with the reason, and
        with "" when the database is back.

        tell_damaged: called with the reason if the database is found to be damaged.
        """
        self._database.tell_away = tell_away
        self._database.tell_damaged = tell_damaged

    def look(self) -> None:
        """Look whether the database is damaged; see `watch`. May be called by any thread."""
        self._database.look()

    def checkpoint(self) -> bool:
        """Ensure that no damage to the database's log can undo what is stored now.

        Call it before files are deleted that older rows name. Return False if that can't be ensured
        now, because another program reads the database. Raises StorageError.
        """
        return self._database.checkpoint()

    def check(self) -> None:
        """Read all of the database. Raises DamagedDatabaseError if it is damaged."""
        self._database.check()

    @property
    def name(self) -> str:
        """The database as shown to people."""
        return self._database.name

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
