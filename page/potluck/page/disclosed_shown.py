"""Views of disclosed data for the web UI: label mix of cohorts, privacy spent. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.common.records.round import Round
from potluck.common.run_file.claims import privacy_claim
from potluck.common.run_file.runfile import stored_values
from potluck.deploy.view.client_disclosures import (
    ClientDisclosures,
    client_disclosures,
    holds_against,
    spent_on_updates,
)
from potluck.deploy.view.readable import natural_order
from potluck.page.page_shapes import (
    ClientPrivacy,
    DisclosedShown,
    MixRound,
    MixShown,
    PrivacyShown,
)
from potluck.rpc.v1 import operator_pb2

Floats = NDArray[np.float64]

MOST_MIXES = 400
"""Maximum number of rounds, the newest ones, whose label mix is shown."""


def shown_disclosures(
    rounds: Sequence[Round],
    classes: int,
    profiles: Sequence[operator_pb2.ClientProfile],
    audits: Sequence[operator_pb2.AuditDisclosuresResponse],
    run_file: str,
) -> DisclosedShown:
    """Return the view of what a run's clients disclosed, and of the privacy they spent on it."""
    return DisclosedShown(
        mix=shown_mix(rounds, classes, profiles),
        privacy=shown_privacy(audits, run_file, rounds),
        roster=[profile.client_id for profile in profiles],
    )


def shown_mix(
    rounds: Sequence[Round],
    classes: int,
    profiles: Sequence[operator_pb2.ClientProfile],
) -> MixShown:
    """Return the label mix of each cohort, from the (maybe noisy) counts that clients disclosed."""
    counts: dict[str, Floats] = {
        each.client_id: np.array(each.label_counts, dtype=np.float64).clip(min=0.0)
        for each in profiles
        if len(each.label_counts) == classes and classes
    }
    shown = rounds[-MOST_MIXES:] if counts else []
    return MixShown(
        classes=classes,
        clients=len(profiles),
        disclosed=len(counts),
        federation=_shares(list(counts.values())),
        rounds=[_mix_of(each, counts) for each in shown],
    )


def _mix_of(committed: Round, counts: dict[str, Floats]) -> MixRound:
    selected = [counts[client] for client in committed.cohort if client in counts]
    included = [counts[client] for client in committed.included if client in counts]
    shares = _shares(selected)
    return MixRound(
        round=committed.number,
        selected=shares,
        included=_shares(included),
        entropy=None if shares is None else _entropy(shares),
    )


def _shares(counts: Sequence[Floats]) -> list[float] | None:
    if not counts:
        return None
    together = np.sum(counts, axis=0)
    total = float(together.sum())
    return None if total <= 0 else [round(float(each) / total, 4) for each in together]


def _entropy(shares: Sequence[float]) -> float:
    positive = np.array([share for share in shares if share > 0])
    return round(float(-(positive * np.log2(positive)).sum()) + 0.0, 3)


def shown_privacy(
    audits: Sequence[operator_pb2.AuditDisclosuresResponse],
    run_file: str,
    rounds: Sequence[Round],
) -> PrivacyShown:
    """Return the privacy loss of each client, as the coordinator saw it."""
    sums = [each for part in audits for each in part.sums]
    profiles = [each for part in audits for each in part.profiles]
    on_updates = spent_on_updates(rounds)
    disclosed = {each.client: each for each in client_disclosures(sums, profiles)}
    known = sorted({*disclosed, *on_updates}, key=natural_order)
    found = [disclosed.get(client, ClientDisclosures(client=client)) for client in known]
    clients = [
        ClientPrivacy(
            client=each.client,
            epsilon=round(each.epsilon, 4),
            sums=each.sums,
            least_hosts=each.least_hosts,
            disclosed=each.signals,
            updates=on_updates.get(each.client),
        )
        for each in found
    ]
    spent = [each.epsilon for each in disclosed.values()]
    return PrivacyShown(
        clients=clients,
        largest=max(spent, default=0.0),
        median=statistics.median(spent) if spent else 0.0,
        sums_released=sum(each.released for each in sums),
        sums_aborted=sum(not each.released for each in sums),
        holds_against=holds_against(independent=any(part.independent_root for part in audits)),
        claim=privacy_claim(stored_values(run_file)),
    )
