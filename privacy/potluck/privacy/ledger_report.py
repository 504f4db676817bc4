"""The privacy of a host's clients as a report for the data's owner: asked, sent, refused, spent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.client.base.state_directory import OUTGOING, PRIVACY
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.outgoing_log import Outgoing, OutgoingLog
from potluck.client.disclosure.privacy_budget import PrivacyBudget
from potluck.client.private_training import CLIENT, RECORD
from potluck.common.errors import DisclosureRefusedError
from potluck.common.records.privacy_loss import BUDGET_SPENT
from potluck.privacy.host_guard import spent_in_epoch
from potluck.privacy.privacy_ledger import ChargedTraining, PrivacyLedger, Unit

_Run = tuple[str, str, str]


class PrivacyReport:
    """The ledgers in a state directory, read once. Nothing is changed."""

    def __init__(self, state: Path, policy: DisclosurePolicy) -> None:
        self._policy = policy
        self._ledger = PrivacyLedger(state / PRIVACY)
        self._budget = PrivacyBudget(state, policy)
        self._outgoing = OutgoingLog(state / OUTGOING)

    def values(self) -> str:
        """Return the report as one line of JSON. Raises StorageError."""
        return json.dumps({"clients": [self._of(client) for client in self._clients()]})

    def lines(self) -> Iterator[str]:
        """Yield the report as sentences. Raises StorageError."""
        clients = self._clients()
        if not clients:
            yield "no privacy loss: no client has trained with noise or disclosed a noisy profile"
        for client in clients:
            yield from _sentences(self._of(client))

    def _clients(self) -> list[str]:
        known = {*self._ledger.clients(), *self._budget.clients()}
        refused = (each for each in self._outgoing.clients() if any(self._refusals(each).values()))
        return sorted({*known, *refused})

    def _refusals(self, client: str) -> Counter[_Run]:
        """Count the trainings that were refused for the budget, by run."""
        return Counter(
            _run_of(entry)
            for entry in self._outgoing.entries(client)
            if entry.get("kind") == Outgoing.FAILURE
            and entry.get("reason") == DisclosureRefusedError.reason
            and BUDGET_SPENT in str(entry.get("message"))
        )

    def _of(self, client: str) -> dict[str, Any]:
        policy, trainings = self._policy, self._ledger.of(client)
        charged = Counter(each.recipient for each in trainings)
        sent = Counter(
            _run_of(entry)
            for entry in self._outgoing.entries(client)
            if entry.get("kind") == Outgoing.UPDATE
        )
        refused = self._refusals(client)
        return {
            "client": client,
            "data_epoch": policy.data_epoch,
            "training": _spent(trainings, policy, RECORD),
            "updates": _spent(trainings, policy, CLIENT),
            "disclosures": {
                "epsilon_spent": float(self._budget.spent(client)),
                "epsilon_limit": policy.epsilon_budget,
            },
            "runs": [
                {
                    "federation": run[0],
                    "coordinator": run[1],
                    "run": run[2],
                    "asked": charged[run] + refused[run],
                    "charged": charged[run],
                    "sent": sent[run],
                    "refused": refused[run],
                    "noise_multiplier": _noise(trainings, run),
                }
                for run in dict.fromkeys((*charged, *refused))
            ],
        }


def _spent(
    trainings: Sequence[ChargedTraining], policy: DisclosurePolicy, unit: Unit
) -> dict[str, Any]:
    """Return what a client's trainings have spent of its limit, for a unit.

    uncounted: number of trainings whose noise does not hide the unit."""
    current = [each for each in trainings if each.data_epoch == policy.data_epoch]
    spent = spent_in_epoch(current, policy, unit).epsilon_spent
    return {
        "epsilon_spent": spent,
        "epsilon_left": max(0.0, policy.training_epsilon - spent),
        "epsilon_limit": policy.training_epsilon,
        "delta": policy.training_delta,
        "unit": unit,
        "uncounted": sum(each.event_in(unit) is None for each in current),
    }


def _noise(trainings: Sequence[ChargedTraining], run: _Run) -> float | None:
    """Return the smallest noise multiplier of a run's trainings; None without trainings."""
    return min((each.noise_multiplier for each in trainings if each.recipient == run), default=None)


def _run_of(entry: Mapping[str, Any]) -> _Run:
    federation, coordinator, run = (
        str(entry.get(name, "")) for name in ("federation", "coordinator", "run")
    )
    return federation, coordinator, run


def _sentences(found: Mapping[str, Any]) -> Iterator[str]:
    training, other = found["training"], found["disclosures"]
    yield (
        f"{found['client']}: trainings with noise spent ε = {training['epsilon_spent']:.4g} of "
        f"{training['epsilon_limit']:g} on data epoch {found['data_epoch']}, "
        f"{training['epsilon_left']:.4g} left (δ = {training['delta']:g}, per record)"
    )
    whole = found["updates"]
    if whole["epsilon_spent"]:
        left_out = ["profiles, sums of counts"]
        if whole["uncounted"]:
            left_out.append(f"{whole['uncounted']} trainings with noise for records only")
        yield (
            f"  updates with noise for the whole client spent ε = {whole['epsilon_spent']:.4g} of "
            f"{whole['epsilon_limit']:g}, {whole['epsilon_left']:.4g} left (δ = "
            f"{whole['delta']:g}, per client); it does not cover {' and '.join(left_out)}"
        )
    yield (
        f"  profiles and sums of counts spent ε = {other['epsilon_spent']:.4g} of "
        f"{other['epsilon_limit']:g}, which adds to it"
    )
    for run in found["runs"]:
        noise = run["noise_multiplier"]
        least = f", noise multiplier {noise:.4g} or more" if noise is not None else ""
        yield (
            f"  run {run['run']} of federation {run['federation']}: {run['asked']} trainings "
            f"asked, {run['charged']} charged, {run['sent']} updates sent, {run['refused']} "
            f"refused{least}"
        )
