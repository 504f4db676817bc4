"""A privacy report for the data's owner: requests, answers, refusals and spent ε of each client."""

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
from potluck.common.records.privacy_loss import BUDGET_SPENT, NO_ANSWER
from potluck.privacy.host.host_guard import spent_in_epoch, spent_together
from potluck.privacy.host.privacy_ledger import (
    Charge,
    ChargedAnswer,
    ChargedTraining,
    PrivacyLedger,
    Unit,
)

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
            yield (
                "no privacy loss: no client has trained or answered with noise, or disclosed a "
                "noisy profile"
            )
        for client in clients:
            yield from _sentences(self._of(client))

    def _clients(self) -> list[str]:
        known = {*self._ledger.clients(), *self._budget.clients()}
        refused = {
            client
            for client in self._outgoing.clients()
            for words in (BUDGET_SPENT, NO_ANSWER)
            if self._refusals(client, words)
        }
        return sorted({*known, *refused})

    def _refusals(self, client: str, words: str) -> Counter[_Run]:
        """Count the refusals for the budget, by run. words: text by which their messages are
        recognised."""
        return Counter(
            _run_of(entry)
            for entry in self._outgoing.entries(client)
            if entry.get("kind") == Outgoing.FAILURE
            and entry.get("reason") == DisclosureRefusedError.reason
            and words in str(entry.get("message"))
        )

    def _of(self, client: str) -> dict[str, Any]:
        policy, charges = self._policy, self._ledger.of(client)
        trainings = [each for each in charges if isinstance(each, ChargedTraining)]
        answers = [each for each in charges if isinstance(each, ChargedAnswer)]
        answered = Counter(each.recipient for each in answers)
        unanswered = self._refusals(client, NO_ANSWER)
        charged = Counter(each.recipient for each in trainings)
        sent = Counter(
            _run_of(entry)
            for entry in self._outgoing.entries(client)
            if entry.get("kind") == Outgoing.UPDATE
        )
        refused = self._refusals(client, BUDGET_SPENT)
        return {
            "client": client,
            "data_epoch": policy.data_epoch,
            "training": _spent(charges, policy, RECORD),
            "updates": _spent(charges, policy, CLIENT),
            "disclosures": {
                "epsilon_spent": float(self._budget.spent(client)),
                "epsilon_limit": policy.epsilon_budget,
            },
            "together": self._together(client, charges),
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
                    "answers_charged": answered[run],
                    "answers_refused": unanswered[run],
                    "answer_noise_multiplier": _noise(answers, run),
                }
                for run in dict.fromkeys((*charged, *refused, *answered, *unanswered))
            ],
        }

    def _together(self, client: str, charges: Sequence[Charge]) -> dict[str, Any]:
        """Return the privacy loss of a single record from all disclosures with noise.

        Counts the trainings and answers of this data epoch, and the profiles and sums of all
        epochs."""
        found = spent_together(charges, self._budget.pure(client), self._policy)
        return {
            "epsilon_spent": found.epsilon_spent,
            "epsilon_limit": self._policy.together_limit,
            "delta": self._policy.training_delta,
            "unit": RECORD,
        }


def _spent(charges: Sequence[Charge], policy: DisclosurePolicy, unit: Unit) -> dict[str, Any]:
    """Return what a client has spent of its limit for a unit, as fields of the report.

    uncounted: number of trainings and answers whose noise does not hide the unit."""
    current = [each for each in charges if each.data_epoch == policy.data_epoch]
    spent = spent_in_epoch(current, policy, unit).epsilon_spent
    return {
        "epsilon_spent": spent,
        "epsilon_left": max(0.0, policy.training_limit - spent),
        "epsilon_limit": policy.training_limit,
        "delta": policy.training_delta,
        "unit": unit,
        "uncounted": sum(each.event_in(unit) is None for each in current),
    }


def _noise(charges: Sequence[Charge], run: _Run) -> float | None:
    """Return the smallest noise multiplier of a run's charges; None if there are none."""
    return min((each.noise_multiplier for each in charges if each.recipient == run), default=None)


def _run_of(entry: Mapping[str, Any]) -> _Run:
    federation, coordinator, run = (
        str(entry.get(name, "")) for name in ("federation", "coordinator", "run")
    )
    return federation, coordinator, run


def _sentences(found: Mapping[str, Any]) -> Iterator[str]:
    training, other = found["training"], found["disclosures"]
    yield (
        f"{found['client']}: on data epoch {found['data_epoch']}, trainings and answers with "
        f"noise spent ε = {training['epsilon_spent']:.4g} of {training['epsilon_limit']:g}, "
        f"{training['epsilon_left']:.4g} left (δ = {training['delta']:g}, per record)"
    )
    whole = found["updates"]
    if whole["epsilon_spent"]:
        left_out = ["profiles, sums of counts"]
        if whole["uncounted"]:
            left_out.append(
                f"{whole['uncounted']} trainings or answers whose noise protects single records "
                "only"
            )
        yield (
            "  updates whose noise protects the whole client spent ε = "
            f"{whole['epsilon_spent']:.4g} of {whole['epsilon_limit']:g}, "
            f"{whole['epsilon_left']:.4g} left (δ = {whole['delta']:g}, per client); this ε does "
            f"not cover {' and '.join(left_out)}"
        )
    yield (
        f"  in addition, profiles and sums of counts spent ε = {other['epsilon_spent']:.4g} of "
        f"{other['epsilon_limit']:g}"
    )
    together = found["together"]
    yield (
        f"  in total, the client spent ε ≤ {together['epsilon_spent']:.4g}, and never spends more "
        f"than {together['epsilon_limit']:g} (δ = {together['delta']:g}, per record)"
    )
    for run in found["runs"]:
        noise = run["noise_multiplier"]
        least = f", noise multiplier {noise:.4g} or more" if noise is not None else ""
        yield (
            f"  run {run['run']} of federation {run['federation']}: {run['asked']} trainings "
            f"requested, {run['charged']} charged, {run['sent']} updates sent, {run['refused']} "
            f"trainings refused{least}"
        )
        if run["answers_charged"] or run["answers_refused"]:
            noise = run["answer_noise_multiplier"]
            least = f", noise multiplier {noise:.4g} or more" if noise is not None else ""
            yield (
                f"    questions about data: {run['answers_charged']} answers charged, "
                f"{run['answers_refused']} refused{least}"
            )
