"""The ledgers of the secure sums in which a host's clients took part; never deleted.

Each client has one file of JSON lines in the state directory's `sums`: the client's name, then one
entry per line. An entry is on disk, synced, before its message is sent. So a process that is killed
in between has recorded more than it sent, never less. An incomplete last line is ignored: nothing
was sent for it. If these files are lost, the record of what was released is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from potluck.client.base.state_directory import clients_with_files, storage_error, write_durably
from potluck.common.disclosure import SumKind
from potluck.common.disk import sync_data
from potluck.common.errors import StorageError
from potluck.common.learning.step_by_step import LEAKS, UNSAFE_STEPWISE
from potluck.secagg.protocol import Ledger, Purpose, entry_from_json
from potluck.secagg.protocol.policy.ledger import LedgerEntry, SumRelease


class SumLedger:
    """The ledgers of all clients in a folder. Calls block; for one caller at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ledgers: dict[str, Ledger] = {}
        self._sizes: dict[str, int] = {}
        """Number of valid bytes in each file."""

    def of(self, client: str) -> Ledger:
        """Return a client's ledger; the caller sets its budget from the owner's policy.

        Raises StorageError if the file exists but can't be read: a damaged file must not lead to a
        second release of the same values.
        """
        ledger = self._ledgers.get(client)
        if ledger is None:
            ledger = self._ledgers[client] = self._read(client)
        return ledger

    def keep(self, client: str, entries: Sequence[LedgerEntry]) -> None:
        """Add entries, synced to disk. Raises StorageError; the ledger is then unchanged."""
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
        """Return the clients that have a ledger, sorted."""
        return clients_with_files(self._folder, ".jsonl")

    # Reports ----------------------------------------------------------------------------------

    def spent(self, client: str) -> Fraction:
        """Return the privacy loss of a client's sums."""
        return self.of(client).spent

    def losses(self, client: str) -> Sequence[Fraction]:
        """Return the privacy loss of each of a client's noisy sums."""
        return self.of(client).losses

    def values(self, client: str) -> Mapping[str, Any]:
        """Return a client's sums and masked uploads as JSON."""
        ledger = self.of(client)
        return {
            "sums": [_sum_values(each) for each in ledger.releases],
            "masked_uploads": [each.model_dump(mode="json") for each in ledger.uploads],
        }

    def lines(self, client: str) -> Iterator[str]:
        """Yield a client's sums as sentences."""
        ledger = self.of(client)
        released = {each.session_id for each in ledger.releases}
        yield from _rounds(each for each in ledger.releases if each.purpose is Purpose.UPDATE)
        for each in ledger.releases:
            if each.purpose is Purpose.UPDATE:
                continue
            others = len(each.clients) - 1
            hosts = len(set(each.clients.values()))
            noise = (
                "without noise"
                if each.epsilon is None
                else f"with noise (ε = {each.epsilon:g}, {each.adjacency})"
            )
            yield (
                f"  {_moment(each.at)} {each.subject}, as `{each.disclosure}`, {noise}, in a sum "
                f"with {others} other clients, {hosts} hosts in all, for run {each.run} of "
                f"federation {each.federation}"
            )
        settled = ledger.settled
        for upload in ledger.uploads:
            if upload.session_id not in released:
                known = settled.get(upload.session_id)
                outcome = (
                    "which other clients may have completed"
                    if known is None
                    else f"which is over {len(known)} clients if other clients completed it"
                    if known
                    else "and no sum includes this input"
                )
                yield (
                    f"  {_moment(upload.at)} a masked input ({upload.input_id}) was sent; this "
                    f"client gave no shares for its sum, {outcome}"
                )

    def remarks(self, clients: Sequence[str], holds_against: str) -> Iterator[str]:
        """Yield sentences on what the sums of these clients hide; see `SumRecords`."""
        releases = [each for client in clients for each in self.of(client).releases]
        if any(each.disclosure == SumKind.STEPWISE for each in releases):
            yield f"`{UNSAFE_STEPWISE}` sums, and the distances sent with such sums, hide nothing:"
            yield from (f"  {leak}" for leak in LEAKS)
        if any(self.of(client).uploads for client in clients):
            purposes = {each.purpose for each in releases} or {Purpose.HISTOGRAM}
            words = {Purpose.HISTOGRAM: "counts", Purpose.UPDATE: "updates"}
            hidden = " and ".join(word for purpose, word in words.items() if purpose in purposes)
            yield f"sums hide the clients' own {hidden} from {holds_against}"

    # Files ------------------------------------------------------------------------------------

    def _append(self, path: Path, lines: bytes, size: int) -> None:
        """Write lines at offset `size`, over the rest of a failed attempt; sync them to disk."""
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
            f"{path} is not a valid ledger of secure sums; restore it from a backup: without the "
            "ledger, this client would forget what was released",
            path=path,
        )

    def _path(self, client: str) -> Path:
        return self._folder / f"{client}.jsonl"


def _first_line(client: str) -> str:
    return json.dumps({"client": client}) + "\n"


def _rounds(releases: Iterable[SumRelease]) -> Iterator[str]:
    """Yield one line per run with masked updates."""
    by_run: dict[tuple[str, str, str], list[SumRelease]] = {}
    for each in releases:
        by_run.setdefault((each.federation, each.run, each.subject), []).append(each)
    for (federation, run, subject), sums in by_run.items():
        others = min(len(each.clients) for each in sums) - 1
        hosts = min(len(set(each.clients.values())) for each in sums)
        rounds = sorted({each.round for each in sums})
        some = f"{len(sums)} sum{'s' * (len(sums) > 1)}"
        which = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
        yield (
            f"  {_moment(sums[-1].at)} {subject}, masked, in {some} with "
            f"at least {others} other clients, at least {hosts} hosts in all, for {which} of "
            f"run {run} of federation {federation}"
        )


def _sum_values(release: SumRelease) -> dict[str, Any]:
    values = release.model_dump(mode="json", exclude={"kind"})
    return {**values, "purpose": release.purpose.name.lower()}


def _moment(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
