"""What the clients of a host remember of secure sums, kept for ever.

One JSON file for each client in the state directory's `sums`. An entry is on disk, synced, before
what it is about is sent: a process killed in between has spent more than it gave, never less.
Whoever deletes these files forgets what was released.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from potluck.client.state_directory import write_durably
from potluck.common.errors import StorageError
from potluck.common.names import is_name
from potluck.common.secagg import Ledger
from potluck.common.secagg.ledger import LedgerEntry


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    client: str
    ledger: Ledger = Ledger()


class SumLedger:
    """The ledgers of all clients in a folder. Blocking; used by one caller at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ledgers: dict[str, Ledger] = {}

    def of(self, client: str) -> Ledger:
        """A client's ledger, whose budget is for its owner to set.

        Raises StorageError if it is there and can't be understood: what was released once must not
        be released again because a file is damaged.
        """
        ledger = self._ledgers.get(client)
        if ledger is None:
            ledger = self._ledgers[client] = self._read(client)
        return ledger

    def keep(self, client: str, entries: Sequence[LedgerEntry]) -> None:
        """Add entries; synced to disk. Raises StorageError; nothing has changed then."""
        if not entries:
            return
        changed = self.of(client).with_entries(entries)
        file = _File(client=client, ledger=changed)
        write_durably(self._path(client), file.model_dump_json(indent=1))
        self._ledgers[client] = changed

    def clients(self) -> list[str]:
        """The clients that have a ledger, sorted."""
        try:
            names = [path.stem for path in self._folder.glob("*.json")]
        except OSError:
            return []
        return sorted(name for name in names if is_name(name))

    def _read(self, client: str) -> Ledger:
        path = self._path(client)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return Ledger()
        except OSError as error:
            raise StorageError(f"can't read {path}: {error.strerror}", path=path) from error
        try:
            file = _File.model_validate_json(content)
        except ValidationError as error:
            raise self._damaged(path) from error
        if file.client != client:
            raise self._damaged(path)
        return file.ledger

    def _damaged(self, path: Path) -> StorageError:
        return StorageError(
            f"{path} is no ledger of secure sums; restore it from a backup: without it this client "
            "would forget what was released",
            path=path,
        )

    def _path(self, client: str) -> Path:
        return self._folder / f"{client}.json"
