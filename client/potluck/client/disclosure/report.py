"""Report of all disclosures, for a data owner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from potluck.client.base.state_directory import OUTGOING
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.outgoing_log import OutgoingLog
from potluck.client.disclosure.outgoing_report import line, summary
from potluck.client.disclosure.privacy_budget import PrivacyBudget
from potluck.client.disclosure.release_ledger import Release
from potluck.client.disclosure.releases import description


class Records:
    """The ledgers in a state directory.

    independent: True if, by the host owner's statement, the people who run the coordinator don't
    keep the federation root.
    """

    def __init__(self, state: Path, policy: DisclosurePolicy, *, independent: bool = False) -> None:
        self._state = state
        self._independent = independent
        self._budget = PrivacyBudget(state, policy)
        self._releases, self._sums = self._budget.releases, self._budget.sums
        self._outgoing = OutgoingLog(state / OUTGOING)
        self._clients = sorted({*self._budget.clients(), *self._outgoing.clients()})

    def values(self) -> str:
        """Return all records as one line of JSON. Raises StorageError."""
        clients = [
            {
                "client": client,
                "epsilon_spent": float(self._budget.spent(client)),
                "epsilon_budget": self._budget.policy.epsilon_budget,
                "disclosures": [_values(release) for release in self._releases.of(client).releases],
                **self._sums.values(client),
                "outgoing": list(self._outgoing.entries(client)),
            }
            for client in self._clients
        ]
        return json.dumps({"clients": clients, "sums_hold_against": self._holds_against})

    def lines(self, *, each: bool = False) -> Iterator[str]:
        """Yield all records as sentences. Raises StorageError.

        each: one line per answer, evaluation, update and failure that was sent; otherwise one per
        run and kind.
        """
        if not self._clients:
            yield f"nothing has been disclosed; there are no records in {self._state}"
        for client in self._clients:
            budget = self._budget.policy.epsilon_budget
            yield f"{client}: ε = {float(self._budget.spent(client)):g} of {budget:g} spent"
            yield from self._disclosed(client)
            yield from self._sums.lines(client)
            sent = self._outgoing.entries(client)
            yield from (f"  {text}" for text in (map(line, sent) if each else summary(sent)))
        yield from self._sums.remarks(self._clients, self._holds_against)

    @property
    def _holds_against(self) -> str:
        if self._independent:
            return "a coordinator that lies"
        return (
            "an honest-but-curious coordinator; set independent_root if the operator of the "
            "coordinator does not have the federation root"
        )

    def _disclosed(self, client: str) -> Iterator[str]:
        for release in self._releases.of(client).releases:
            yield (
                f"  {_moment(release.at)} {description(release)} of data epoch "
                f"{release.data_epoch}: {release.payload_json}"
            )
            for recipient in release.recipients:
                yield (
                    f"    to the coordinator of federation {recipient.federation} at "
                    f"{recipient.coordinator}, first for run {recipient.run} on "
                    f"{_moment(recipient.at)}"
                )


def _values(release: Release) -> dict[str, Any]:
    return {
        "signal": release.signal,
        "data_epoch": release.data_epoch,
        "parameters": json.loads(release.parameters_json),
        "payload": json.loads(release.payload_json),
        "epsilon": release.epsilon,
        "signed": bool(release.signature),
        "at": release.at.isoformat(),
        "recipients": [each.model_dump(mode="json") for each in release.recipients],
    }


def _moment(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
