"""Interface to the records of secure sums that clients of a host took part in.

`potluck.secagg` implements it and keeps the records. The host finds it by name, in the entry-point
group `potluck.secure_sums`. Without `potluck.secagg`, a client that has records can't disclose
anything with noise: its spent budget is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Protocol

from potluck.client.base.state_directory import clients_with_files
from potluck.common.errors import StorageError
from potluck.common.settings import plugins

_LEDGER: Final = "ledger"


class SumRecords(Protocol):
    """The ledgers of all clients. Methods block; StorageError if a ledger can't be read."""

    def clients(self) -> list[str]:
        """Return the clients that have a ledger, sorted."""
        ...

    def spent(self, client: str) -> Fraction:
        """Return the privacy loss of a client's sums."""
        ...

    def values(self, client: str) -> Mapping[str, Any]:
        """Return a client's sums and masked uploads as JSON, under `sums` and `masked_uploads`."""
        ...

    def lines(self, client: str) -> Iterator[str]:
        """Yield a client's sums as sentences."""
        ...

    def remarks(self, clients: Sequence[str], holds_against: str) -> Iterator[str]:
        """Yield sentences that explain what the sums of these clients hide.

        holds_against: description of the parties from which the sums hide it.
        """
        ...


class UnreadableSums:
    """Stands in for the ledgers on a host without secure aggregation: raises if one exists."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clients(self) -> list[str]:
        """Return the clients that have a ledger, sorted."""
        return clients_with_files(self._folder, ".jsonl")

    def spent(self, client: str) -> Fraction:
        """Return 0. Raises StorageError if the client has a ledger."""
        if client in self.clients():
            raise StorageError(
                f"can't read the ledger of secure sums of client '{client}' in {self._folder}: "
                "this host lacks the package potluck.secagg; install all of potluck",
                client=client,
            )
        return Fraction(0)

    def values(self, client: str) -> Mapping[str, Any]:
        """Return no sums. Raises StorageError if the client has a ledger."""
        self.spent(client)
        return {"sums": [], "masked_uploads": []}

    def lines(self, client: str) -> Iterator[str]:
        """Yield nothing. Raises StorageError if the client has a ledger."""
        self.spent(client)
        return iter(())

    def remarks(self, clients: Sequence[str], holds_against: str) -> Iterator[str]:  # noqa: ARG002  # as in `SumRecords`
        """Yield nothing."""
        return iter(())


def open_sum_records(folder: Path) -> SumRecords:
    """Return the ledgers in a folder."""
    if not plugins.is_present(plugins.SECURE_SUMS, _LEDGER):
        return UnreadableSums(folder)
    found: SumRecords = plugins.find(plugins.SECURE_SUMS, _LEDGER)(folder)
    return found
