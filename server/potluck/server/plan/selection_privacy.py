"""Explains how a run with noise treats a selector: free, charged to clients' ledgers, or refused.

Commands and the reference print it; runs themselves refuse selectors by `HIDES`. The result follows
from what a selector declares and from the same table. A run with `[privacy]` protects single
records or single clients. A selector's choices cost no additional privacy loss if they follow only
from data that the run releases in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from potluck.server.plan.needs_and_hides import HIDES, Trait, selector_traits
from potluck.server.selection import Selector


class Protection(StrEnum):
    """The unit of a run's privacy, as in `[privacy]` of a run file."""

    RECORD = "record"
    CLIENT = "client"


class Treatment(StrEnum):
    """The treatment of a selector in a run with noise."""

    FREE = "free"
    """The selector's choices follow from noisy updates, models or profiles, or from facts that are
    not about data."""
    CHARGED = "charged"
    """Clients answer the selector's questions with noise, and their ledgers are charged."""
    REFUSED = "refused"
    """The run is refused before it starts."""


@dataclass(frozen=True, kw_only=True)
class SelectionVerdict:
    """The treatment of a selector in a run with noise.

    reason: the data that the selector uses, in words; empty if it uses no data. refusal: message
    with which the run is refused, with selector, question and remedy; empty if it is not refused.
    """

    treatment: Treatment
    reason: str
    refusal: str = ""


HIDERS: Final[Mapping[Protection, Trait]] = {
    Protection.RECORD: Trait.PRIVATE_RECORDS,
    Protection.CLIENT: Trait.PRIVATE_CLIENTS,
}
"""Trait of a run with noise, by the unit that the noise protects."""


def verdict_on(selector: Selector, name: str, protection: Protection) -> SelectionVerdict:
    """Return the treatment of a selector with its options. name: as in run files.

    Ignores secure aggregation, which hides more data from selectors.
    """
    traits = {trait: str(detail) for trait, detail in selector_traits(selector).items() if detail}
    for hidden, refusal in HIDES[HIDERS[protection]].items():
        if hidden in traits:
            text = refusal.format(
                selector=name, detail=traits[hidden], strategy="", task="", steps=""
            )
            return SelectionVerdict(
                treatment=Treatment.REFUSED, reason=_cause(text, name), refusal=text
            )
    reasons, treatment = _reasons(traits, protection), Treatment.FREE
    if Trait.QUESTIONS in traits:
        reasons, treatment = (
            [f"asks clients for {traits[Trait.QUESTIONS]}", *reasons],
            Treatment.CHARGED,
        )
    return SelectionVerdict(treatment=treatment, reason=", and ".join(reasons))


def _cause(refusal: str, name: str) -> str:
    """Return the cause in a refusal's error message in a few words, without the selector's name and
    the remedy."""
    cause, _, _ = refusal.partition(": ")[2].partition(";")
    return cause.removeprefix(f"{name} ").partition(", ")[0]


def _reasons(traits: Mapping[Trait, str], protection: Protection) -> list[str]:
    """Return texts about the data that a selector uses without additional privacy loss; empty if it
    uses no data of clients."""
    reasons = []
    if Trait.PROFILES in traits:
        by_unit = {
            Protection.RECORD: "whose noise has a budget of its own",
            Protection.CLIENT: "which the privacy loss of clients leaves out",
        }
        reasons.append(f"uses {traits[Trait.PROFILES]}, {by_unit[protection]}")
    if Trait.FACTS in traits or Trait.MEANS in traits:
        reasons.append("uses noisy updates")
    return reasons
