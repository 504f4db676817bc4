"""The spool: a folder that holds received updates until they are combined, one file per client and
attempt.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from potluck.common.errors import LayoutError, StorageError, disk_error
from potluck.common.monitoring.metric_labels import SUM
from potluck.common.tensors.spare_files import SpareFiles
from potluck.common.tensors.tensor_files import file_digest
from potluck.common.updates.fixed_point import members_digest
from potluck.common.updates.sum_files import opened_sum_file
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.store.records import AttemptKey, MemberRow, MemberState, UpdateRow

# The spool ----------------------------------------------------------------------------------------

_MOST_SPARE_FILES = 10_000


class Spool:
    """The uploaded updates of one run, on disk. Blocking; call it from a thread.

    A file `CLIENT@DIGEST.safetensors` is complete, and its digest is verified. A file that ends in
    `.part` is still being received.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spare = SpareFiles(folder / "spare", keep=_MOST_SPARE_FILES)

    @property
    def folder(self) -> Path:
        """Folder of the spool."""
        return self._folder

    def path(self, round_number: int, attempt: int, client: str, blake3: str) -> Path:
        """Return the path of a client's update with this digest. Creates the attempt's folder."""
        folder = self._folder / f"{round_number}.{attempt}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / f"{client}@{blake3[:16]}.safetensors"

    def find(self, round_number: int, attempt: int, blake3: str) -> Path | None:
        """Return a file of an attempt by its digest; None if not found. Needed for a sum of many
        clients, because its file has the name of only one of them."""
        folder = self._folder / f"{round_number}.{attempt}"
        return next(iter(sorted(folder.glob(f"*@{blake3[:16]}.safetensors"))), None)

    def clear_others(self, path: Path) -> None:
        """Delete a client's other files in the same attempt."""
        client = path.name.partition("@")[0]
        for other in path.parent.glob(f"{client}@*"):
            if not other.name.startswith(path.name):
                other.unlink(missing_ok=True)  # a concurrent upload may have renamed it just now

    def take_spare(self) -> Path | None:
        """Return a file of an earlier round that a new update may overwrite; None if there is
        none."""
        return self._spare.take()

    def clear(
        self,
        round_number: int,
        attempt: int,
        spent: Iterable[Path] = (),
        *,
        keep: Collection[str] = (),
    ) -> None:
        """Delete an attempt's updates. Files in `spent` are kept apart, for later updates to
        overwrite.

        keep: clients whose updates are kept.

        Files outside `spent` are deleted, not overwritten: they may still be open while a late
        update is checked.
        """
        self._spare.clear()
        with contextlib.suppress(FileNotFoundError):
            for path in spent:
                self._spare.give(path)
            self.clear_some(round_number, attempt, keep=keep)

    def clear_some(self, round_number: int, attempt: int, *, keep: Collection[str] = ()) -> None:
        """Delete an attempt's updates, except those of the clients in `keep`."""
        folder = self._folder / f"{round_number}.{attempt}"
        with contextlib.suppress(FileNotFoundError):
            if keep:
                for path in folder.iterdir():
                    if path.name.partition("@")[0] not in keep:
                        path.unlink(missing_ok=True)
            else:
                _remove(folder)

    def clear_except(self, kept: Mapping[tuple[int, int], Collection[str]]) -> None:
        """Delete the updates of all attempts except the given ones, for example after a crash.

        kept: (round, attempt) → clients whose updates are kept; all clients if the collection is
        empty.
        """
        if not self._folder.is_dir():
            return
        for folder in self._folder.iterdir():
            found = [key for key in kept if folder.name == f"{key[0]}.{key[1]}"]
            if not found:
                _remove(folder)
            elif kept[found[0]]:
                self.clear_some(*found[0], keep=kept[found[0]])

    def remove(self) -> None:
        """Delete all files, because the run is over."""
        with contextlib.suppress(FileNotFoundError):
            _remove(self._folder)


def _remove(folder: Path) -> None:
    """Delete a folder. Raises FileNotFoundError, or StorageError that names the folder.

    The folder is renamed first, so that uploads that end meanwhile can't add files to it.
    """
    doomed = folder.with_name(f"{folder.name}.over")
    try:
        if doomed.exists():  # the process was killed before it could delete this folder
            shutil.rmtree(doomed)
        folder.rename(doomed)
        shutil.rmtree(doomed)
    except FileNotFoundError:
        raise
    # `error` names a file relative to the folder; the new error names the folder
    except OSError as error:
        raise disk_error(error, folder) from error


# Updates after a restart --------------------------------------------------------------------------
# These functions block: call them in a thread.


def still_spooled(
    spool: Spool,
    key: AttemptKey,
    members: Iterable[MemberRow],
    update_id: Callable[[str], str],
    *,
    missed: bool = False,
) -> Mapping[str, SpooledUpdate]:
    """Return, by client, the received updates whose files are still intact after a restart.

    A crash of the machine may damage files. A sum is only returned if all its members are among
    `members`: a client may have left the cohort after the sum was stored.

    update_id: function that returns the id of a client's update in the attempt. missed: True to
    include updates that missed the round.
    """
    states = {MemberState.RECEIVED}
    if missed:
        states |= {MemberState.LATE, MemberState.SPARED}
    sums: dict[str, dict[str, UpdateRow]] = {}
    found: dict[str, SpooledUpdate] = {}
    for member in members:
        client, row = member.client_id, member.update
        if member.state not in states or row is None:
            continue
        if row.encoding == SUM:
            sums.setdefault(row.blake3, {})[client] = row
            continue
        path = spool.path(key.round, key.attempt, client, row.blake3)
        if intact(path, row.blake3):
            found[client] = SpooledUpdate(
                client=client, path=path, row=row, dropped=member.work.dropped
            )
    for blake3, rows in sums.items():
        file = spool.find(key.round, key.attempt, blake3)
        ids = [update_id(client) for client in rows]
        if file is not None and intact(file, blake3) and _holds(file, ids):
            for client, row in rows.items():
                found[client] = SpooledUpdate(client=client, path=file, row=row)
    return found


def intact(path: Path, blake3: str) -> bool:
    """Return True if a spooled file still has the digest that was verified at its upload."""
    try:
        return file_digest(path).blake3 == blake3
    except StorageError:
        return False


def _holds(path: Path, update_ids: Sequence[str]) -> bool:
    try:
        with opened_sum_file(path) as file:
            return file.members == members_digest(update_ids)
    except (LayoutError, StorageError):
        return False
