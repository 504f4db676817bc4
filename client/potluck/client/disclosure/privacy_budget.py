"""The privacy budget of each client of a host, which releases and secure sums share."""

from __future__ import annotations

import contextlib
from fractions import Fraction
from pathlib import Path

from potluck.client.base.host_metrics import HostMetrics
from potluck.client.base.state_directory import DISCLOSURES, SUMS
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy, check_budget
from potluck.client.disclosure.release_ledger import Release, ReleaseLedger
from potluck.client.disclosure.sum_records import open_sum_records
from potluck.common.disclosure import Parameters
from potluck.common.errors import StorageError


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

    def clients(self) -> list[str]:
        """The clients that have a ledger, sorted."""
        return sorted({*self.releases.clients(), *self.sums.clients()})

    def spent(self, client: str) -> Fraction:
        """Return the total privacy loss of a client's releases and sums."""
        return self.releases.of(client).spent + self.sums.spent(client)

    def check_release(self, client: str, signal: str, parameters: Parameters) -> None:
        """Raise DisclosureRefusedError if one more release exceeds the client's budget."""
        releases = len(self.releases.of(client).releases)
        check_budget(
            self.policy, client, signal, parameters, spent=self.spent(client), releases=releases
        )

    def for_sums(self, client: str) -> float:
        """Return a client's total budget for sums: what its releases leave, including what sums
        have spent.
        """
        left = Fraction(repr(self.policy.epsilon_budget)) - self.releases.of(client).spent
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
