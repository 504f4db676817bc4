"""The record of disclosures, as a report for a data owner."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
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
from potluck.common.disclosure import SumKind
from potluck.common.learning.step_by_step import LEAKS, UNSAFE_STEPWISE
from potluck.common.secagg import Purpose
from potluck.common.secagg.policy.ledger import SumRelease


class Records:
    """The ledgers in a state directory.

    independent: True if, by the host owner's statement, the people who run the coordinator don't
    keep the federation root."""

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
                "sums": [_sum_values(each) for each in self._sums.of(client).releases],
                "masked_uploads": [
                    each.model_dump(mode="json") for each in self._sums.of(client).uploads
                ],
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
            yield from self._summed(client)
            sent = self._outgoing.entries(client)
            yield from (f"  {text}" for text in (map(line, sent) if each else summary(sent)))
        if any(self._has_stepwise(client) for client in self._clients):
            yield f"`{UNSAFE_STEPWISE}` sums, and the distances sent with them, hide nothing:"
            yield from (f"  {leak}" for leak in LEAKS)
        if any(self._sums.of(client).uploads for client in self._clients):
            yield f"sums hide the clients' own {self._hidden} from {self._holds_against}"

    @property
    def _hidden(self) -> str:
        releases = [each for client in self._clients for each in self._sums.of(client).releases]
        purposes = {each.purpose for each in releases} or {Purpose.HISTOGRAM}
        words = {Purpose.HISTOGRAM: "counts", Purpose.UPDATE: "updates"}
        return " and ".join(word for purpose, word in words.items() if purpose in purposes)

    @property
    def _holds_against(self) -> str:
        if self._independent:
            return "a coordinator that lies"
        return (
            "an honest-but-curious coordinator; set independent_root if somebody else than who "
            "runs the coordinator keeps the federation root"
        )

    def _has_stepwise(self, client: str) -> bool:
        return any(each.disclosure == SumKind.STEPWISE for each in self._sums.of(client).releases)

    def _summed(self, client: str) -> Iterator[str]:
        ledger = self._sums.of(client)
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
                    "which others may have completed"
                    if known is None
                    else f"which is over {len(known)} clients if others completed it"
                    if known
                    else "and it is in no sum"
                )
                yield (
                    f"  {_moment(upload.at)} a masked input ({upload.input_id}) was sent; no "
                    f"shares were given for its sum, {outcome}"
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


def _rounds(releases: Iterable[SumRelease]) -> Iterator[str]:
    """Masked updates, a line for each run."""
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
