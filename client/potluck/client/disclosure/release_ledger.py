"""The releases of a host's clients: never deleted, and sent unchanged if requested again.

Each client has one JSON file in the state directory's `disclosures`. A release is synced to disk
before any part of it is sent. So a process that is killed before sending later sends the stored
release, without a second draw of the noise. If these files are lost, the record of the spent budget
is lost.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from potluck.client.base.state_directory import clients_with_files, write_durably
from potluck.client.disclosure.laplace import exact_epsilon
from potluck.common.errors import StorageError


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Recipient(_Kept):
    """A coordinator and run that received a release, and the time of the first delivery."""

    federation: str
    coordinator: str
    run: str
    at: AwareDatetime

    def same(self, other: Recipient) -> bool:
        """Return True if both recipients are the same run of the same coordinator."""
        mine, theirs = ((each.federation, each.coordinator, each.run) for each in (self, other))
        return mine == theirs


class ReleaseKey(NamedTuple):
    """The identity of a release; a client makes only one release per key."""

    data_epoch: int
    signal: str
    parameters_json: str


class Release(_Kept):
    """One disclosure. epsilon: its privacy loss; None if no noise was added."""

    data_epoch: int
    signal: str
    parameters_json: str
    payload_json: str
    signature: str = ""
    epsilon: float | None
    at: AwareDatetime
    recipients: tuple[Recipient, ...] = ()

    @property
    def key(self) -> ReleaseKey:
        """The identity of the release."""
        return ReleaseKey(self.data_epoch, self.signal, self.parameters_json)


class ClientLedger(_Kept):
    """All releases of a client, oldest first."""

    client: str
    releases: tuple[Release, ...] = ()

    @property
    def spent(self) -> Fraction:
        """The privacy loss so far: the sum of all ε."""
        costs = (exact_epsilon(each.epsilon) for each in self.releases if each.epsilon is not None)
        return sum(costs, Fraction(0))


class ReleaseLedger:
    """The ledgers of all clients in a folder. Calls block; for one caller at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ledgers: dict[str, ClientLedger] = {}

    def of(self, client: str) -> ClientLedger:
        """Return a client's ledger. Raises StorageError if the ledger exists but can't be read.

        A damaged file must not lead to a second draw of the noise.
        """
        ledger = self._ledgers.get(client)
        if ledger is None:
            ledger = self._ledgers[client] = self._read(client)
        return ledger

    def find(self, client: str, key: ReleaseKey) -> Release | None:
        """Return the release made under this key; None if there is none."""
        return next((each for each in self.of(client).releases if each.key == key), None)

    def keep(self, client: str, release: Release) -> None:
        """Add a release, or replace the release with the same key (to add a recipient); sync to
        disk.

        Raises StorageError; the ledger is then unchanged.
        """
        ledger = self.of(client)
        known = {each.key: each for each in ledger.releases} | {release.key: release}
        changed = ClientLedger(client=client, releases=tuple(known.values()))
        self._write(client, changed)
        self._ledgers[client] = changed

    def clients(self) -> list[str]:
        """Return the clients that have a ledger, sorted."""
        return clients_with_files(self._folder, ".json")

    def _read(self, client: str) -> ClientLedger:
        path = self._path(client)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return ClientLedger(client=client)
        except OSError as error:
            raise StorageError(f"can't read {path}: {error.strerror}", path=path) from error
        try:
            ledger = ClientLedger.model_validate_json(content)
        except ValidationError as error:
            raise self._damaged(path) from error
        if ledger.client != client:
            raise self._damaged(path)
        return ledger

    def _damaged(self, path: Path) -> StorageError:
        return StorageError(
            f"{path} is not a ledger of disclosures; restore it from a backup, because only the "
            "ledger records the budget that this client has spent",
            path=path,
        )

    def _write(self, client: str, ledger: ClientLedger) -> None:
        write_durably(self._path(client), ledger.model_dump_json(indent=1))

    def _path(self, client: str) -> Path:
        return self._folder / f"{client}.json"
