"""Data that each client of a run disclosed, summed over the coordinator's audit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from potluck.common.records.round import Round
from potluck.deploy.view.readable import natural_order
from potluck.rpc.v1 import operator_pb2


@dataclass(kw_only=True)
class ClientDisclosures:
    """Data that one client disclosed.

    sums: number of secure sums that include the client. least_hosts: number of hosts in the
    smallest of these sums; None if there is none. signals: signals that the client disclosed
    outside sums, each with the version of its data. epsilon: total privacy loss of all noisy
    releases.
    """

    client: str
    sums: int = 0
    least_hosts: int | None = None
    signals: list[str] = field(default_factory=list)
    epsilon: float = 0.0


def client_disclosures(
    sums: Sequence[operator_pb2.AuditedSum], profiles: Sequence[operator_pb2.AuditedProfile]
) -> list[ClientDisclosures]:
    """Return one record per client that disclosed anything, in natural order of client names.

    Natural order: client-2 comes before client-10.
    """
    found: dict[str, ClientDisclosures] = {}
    for each in sums:
        if not each.released:
            continue
        hosts = len(set(each.hosts.values()))
        for client in each.hosts:
            mine = found.setdefault(client, ClientDisclosures(client=client))
            mine.sums += 1
            mine.epsilon += each.epsilon
            mine.least_hosts = hosts if mine.least_hosts is None else min(mine.least_hosts, hosts)
    for profile in profiles:
        mine = found.setdefault(profile.client_id, ClientDisclosures(client=profile.client_id))
        mine.signals.append(f"{profile.signal} (epoch {profile.data_epoch})")
        mine.epsilon += profile.epsilon
    return sorted(found.values(), key=lambda each: natural_order(each.client))


def spent_on_updates(rounds: Sequence[Round]) -> dict[str, float]:
    """Return ε of each client's updates after the last of `rounds`, as the coordinator knows it.

    The result is empty for runs without `[privacy]`."""
    found: dict[str, float] = {}
    for each in rounds:
        if each.privacy is not None:
            found |= each.privacy.clients
    return found


def profile_values(each: operator_pb2.AuditedProfile) -> dict[str, Any]:
    """Return a profile's disclosure as plain values."""
    return {
        "client": each.client_id,
        "signal": each.signal,
        "data_epoch": each.data_epoch,
        "epsilon": each.epsilon or None,
        "at": each.at,
    }


def holds_against(*, independent: bool) -> str:
    """Return the text that names from whom a secure sum hides the clients' values."""
    if independent:
        return (
            "a coordinator that lies, if at most the assumed number of hosts collude with the "
            "coordinator"
        )
    return (
        "an honest-but-curious coordinator only, because one party has both roots, or did not "
        "set independent_root"
    )
