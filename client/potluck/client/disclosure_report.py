"""The record of disclosures as a data owner reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from potluck.client.disclosing import description
from potluck.client.disclosure_ledger import DisclosureLedger, Release
from potluck.client.disclosure_policy import DisclosurePolicy


def disclosure_values(folder: Path, policy: DisclosurePolicy) -> str:
    """Everything in a folder of ledgers as one line of JSON. Raises StorageError."""
    ledger = DisclosureLedger(folder)
    clients = [
        {
            "client": client,
            "epsilon_spent": float(ledger.of(client).spent),
            "epsilon_budget": policy.epsilon_budget,
            "disclosures": [_values(release) for release in ledger.of(client).releases],
        }
        for client in ledger.clients()
    ]
    return json.dumps({"clients": clients})


def disclosure_lines(folder: Path, policy: DisclosurePolicy) -> Iterator[str]:
    """The same in plain words. Raises StorageError."""
    ledger = DisclosureLedger(folder)
    clients = ledger.clients()
    if not clients:
        yield f"nothing has been disclosed; there are no records in {folder}"
    for client in clients:
        entry = ledger.of(client)
        yield f"{client}: ε = {float(entry.spent):g} of {policy.epsilon_budget:g} spent"
        for release in entry.releases:
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
