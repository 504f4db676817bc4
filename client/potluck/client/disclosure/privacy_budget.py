"""The privacy budget of each client of a host, which releases and secure sums share.

If the owner sets `total_epsilon`, it limits releases, sums, and trainings and answers with noise
together. Then each of these holds `PrivacyBudget.turn` from the check of a charge until the charge
is on disk.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Protocol

from potluck.client.base.host_metrics import HostMetrics
from potluck.client.base.state_directory import (
    DISCLOSURES,
    PRIVACY,
    SUMS,
    clients_with_files,
)
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy, check_budget
from potluck.client.disclosure.laplace import exact_epsilon
from potluck.client.disclosure.release_ledger import Release, ReleaseLedger
from potluck.common.disclosure import Parameters
from potluck.common.errors import StorageError
from potluck.common.settings import plugins

# Records of secure sums ---------------------------------------------------------------------------
# `potluck.secagg` implements `SumRecords` and writes the records. The host finds it by name, in the
# entry-point group `potluck.secure_sums`. Without `potluck.secagg`, a client that has records can't
# disclose anything with noise: its spent budget is unknown.

_LEDGER: Final = "ledger"


class SumRecords(Protocol):
    """The ledgers of all clients' sums. Methods block; they raise StorageError if reading fails."""

    def clients(self) -> list[str]:
        """Return the clients that have a ledger, sorted."""
        ...

    def spent(self, client: str) -> Fraction:
        """Return the privacy loss of a client's sums."""
        ...

    def losses(self, client: str) -> Sequence[Fraction]:
        """Return the privacy loss of each of a client's noisy sums."""
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
    """Stands in for the ledgers on a host without secure aggregation; raises if a ledger exists."""

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
                "this host lacks the package potluck.secagg; install all packages of Potluck",
                client=client,
            )
        return Fraction(0)

    def losses(self, client: str) -> Sequence[Fraction]:
        """Return an empty sequence. Raises StorageError if the client has a ledger of sums."""
        self.spent(client)
        return ()

    def values(self, client: str) -> Mapping[str, Any]:
        """Return empty lists. Raises StorageError if the client has a ledger of sums."""
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


# The budget ---------------------------------------------------------------------------------------


class TrainingsCharged(Protocol):
    """Access to the privacy loss of trainings and answers with noise."""

    def room(self, client: str, pure: Sequence[Fraction]) -> Fraction:
        """Return the largest ε of one more release or sum that `total_epsilon` allows.

        pure: ε of each earlier release and sum. Raises StorageError if the client's ledger can't be
        read.
        """
        ...


class PrivacyBudget:
    """The ledgers of releases and of sums, with one budget for both.

    Its methods raise StorageError if a ledger can't be read or written.
    """

    def __init__(
        self, state: Path, policy: DisclosurePolicy, metrics: HostMetrics | None = None
    ) -> None:
        """`state`: the state directory, which contains the ledgers."""
        self.policy = policy
        self.releases = ReleaseLedger(state / DISCLOSURES)
        self.sums = open_sum_records(state / SUMS)
        self._metrics = metrics or HostMetrics()
        self._trainings = state / PRIVACY
        self._charged: Callable[[], TrainingsCharged] = _unknown
        self.turn = threading.RLock()

    def share_with(self, charged: Callable[[], TrainingsCharged]) -> None:
        """Set the function that returns the ledgers of trainings and answers.

        It is called only if a client has such a ledger, since it may take seconds."""
        self._charged = charged

    def clients(self) -> list[str]:
        """Return the clients that have a ledger, sorted."""
        return sorted({*self.releases.clients(), *self.sums.clients()})

    def spent(self, client: str) -> Fraction:
        """Return the total privacy loss of a client's releases and sums."""
        return self.releases.of(client).spent + self.sums.spent(client)

    def check_release(self, client: str, signal: str, parameters: Parameters) -> None:
        """Raise DisclosureRefusedError if one more release exceeds the client's budget."""
        check_budget(
            self.policy,
            client,
            signal,
            parameters,
            spent=self.spent(client),
            releases=len(self.releases.of(client).releases),
            room=self._room(client),
        )

    def pure(self, client: str) -> Sequence[Fraction]:
        """Return the ε of each noisy release and of each noisy sum of a client."""
        releases = (each.epsilon for each in self.releases.of(client).releases)
        found = [exact_epsilon(each) for each in releases if each is not None]
        return (*found, *self.sums.losses(client))

    def _room(self, client: str) -> Fraction | None:
        """Return the largest ε of one more release or sum; None without `total_epsilon`."""
        if self.policy.total_epsilon is None:
            return None
        if client in clients_with_files(self._trainings, ".jsonl"):
            return self._charged().room(client, self.pure(client))
        return max(Fraction(0), Fraction(repr(self.policy.total_epsilon)) - self.spent(client))

    def for_sums(self, client: str) -> float:
        """Return a client's budget for all its sums together: its budget minus the loss of its
        releases.
        """
        left = Fraction(repr(self.policy.epsilon_budget)) - self.releases.of(client).spent
        room = self._room(client)
        if room is not None:
            left = min(left, self.sums.spent(client) + room)
        return max(0.0, float(left))

    def keep_release(self, client: str, release: Release) -> None:
        """Add a release, or replace the release with the same key; sync to disk."""
        self.releases.keep(client, release)
        self.show(client)

    def show(self, *clients: str) -> None:
        """Update the metrics of the privacy loss that clients have spent.

        Unreadable ledgers are skipped here, and reported when they are needed."""
        for client in clients:
            with contextlib.suppress(StorageError):
                self._metrics.spent(float(self.spent(client)))


def _unknown() -> TrainingsCharged:
    raise StorageError(
        "total_epsilon can't be checked: the ledgers of trainings with noise were not opened"
    )
