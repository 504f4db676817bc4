"""The only protection that Potluck claims for the updates of a run, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from potluck.common.disclosure import CLAIM
from potluck.common.run_file.run_settings import PrivateUpdates

_HIDDEN: Final = {
    "record": "updates hide whether any single record was among a client's samples, from everyone "
    "who sees updates or models",
    "client": "sums hide each client's whole update from everyone who sees sums or models, unless "
    "more than masking.colluding_hosts collude",
}
"""By the unit of `[privacy]`: the protected fact, and the parties from which it is hidden."""


def privacy_claim(run_file: Mapping[str, Any]) -> str:
    """Return the privacy claim for a run's updates; empty if nothing is claimed.

    run_file: the values of a valid run file, as TOML gives them.
    """
    privacy = run_file.get("privacy")
    if privacy is not None:
        return f"[privacy]: {_of_noise(PrivateUpdates.model_validate(dict(privacy)))}"
    return f"secure_aggregation: {CLAIM}" if run_file.get("secure_aggregation") else ""


def _of_noise(privacy: PrivateUpdates) -> str:
    loss = "an ε that grows with each training"
    if privacy.epsilon is not None:
        loss = f"ε ≤ {privacy.epsilon:g} in this run"
    if privacy.at_coordinator:
        return (
            "models hide what a client's updates contain from everyone who sees only models, with "
            f"{loss} and δ = {privacy.delta:g} per client; the coordinator and its operators see "
            "each update"
        )
    return (
        f"{_HIDDEN[privacy.unit]}, with {loss} and δ = {privacy.delta:g} per client; each host's "
        "ledger holds its owner's limit over all runs"
    )
