"""The ledgers of secure sums in which clients of a host took part, kept for ever.

Each client has one file of JSON lines in the state directory's `sums`: its name, then one entry per
line. An entry is on disk, synced, before its message is sent. So a process that is killed in
between has recorded more than it sent, never less. An incomplete last line was never acted upon. If
these files are lost, the record of what was released is lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from potluck.client.base.state_directory import clients_with_files, storage_error, write_durably
from potluck.common.errors import StorageError
from potluck.common.process.disk import sync_data
from potluck.common.secagg import Ledger, entry_from_json
from potluck.common.secagg.policy.ledger import LedgerEntry


class SumLedger:
    """The ledgers of all clients in a folder. Blocking; used by one caller at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ledgers: dict[str, Ledger] = {}
        self._sizes: dict[str, int] = {}
        """Number of valid bytes in each file."""

    def of(self, client: str) -> Ledger:
        """Return a client's ledger; the caller sets its budget from the owner's policy.

        Raises StorageError if it exists but can't be read: values that were released once must not
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
        lines = "".join(each.model_dump_json() + "\n" for each in entries)
        size = self._sizes.get(client, 0)
        if size:
            self._append(self._path(client), lines.encode(), size)
        else:
            lines = _first_line(client) + lines
            write_durably(self._path(client), lines)
        self._sizes[client] = size + len(lines.encode())
        self._ledgers[client] = changed

    def clients(self) -> list[str]:
        """The clients that have a ledger, sorted."""
        return clients_with_files(self._folder, ".jsonl")

    def _append(self, path: Path, lines: bytes, size: int) -> None:
        """Write after the bytes that are in order, over what an earlier attempt left there."""
        try:
            with path.open("r+b") as file:
                file.seek(size)
                file.truncate()
                file.write(lines)
                file.flush()
                sync_data(file.fileno())
        except OSError as error:
            raise storage_error(path, error) from error

    def _read(self, client: str) -> Ledger:
        path = self._path(client)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return Ledger()
        except OSError as error:
            raise StorageError(f"can't read {path}: {error.strerror}", path=path) from error
        whole = content[: content.rfind(b"\n") + 1]
        first, *lines = whole.splitlines(keepends=True) or [b""]
        if first != _first_line(client).encode():
            raise self._damaged(path)
        try:
            entries = tuple(entry_from_json(line) for line in lines)
        except ValidationError as error:
            raise self._damaged(path) from error
        self._sizes[client] = len(whole)
        return Ledger(entries=entries)

    def _damaged(self, path: Path) -> StorageError:
        return StorageError(
            f"{path} is no ledger of secure sums; restore it from a backup: without it this client "
            "would forget what was released",
            path=path,
        )

    def _path(self, client: str) -> Path:
        return self._folder / f"{client}.jsonl"


def _first_line(client: str) -> str:
    return json.dumps({"client": client}) + "\n"
