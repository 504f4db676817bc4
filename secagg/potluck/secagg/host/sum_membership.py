"""The owner's rules for secure sums, the members that may be in a sum with a host's clients, and
the clients' signing keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy, SumName
from potluck.client.disclosure.laplace import sensitivity
from potluck.client.disclosure.member_keys import key_in_force
from potluck.common.disclosure import SumKind
from potluck.common.errors import DisclosureRefusedError, IdentityError
from potluck.common.learning.step_by_step import UNSAFE_STEPWISE
from potluck.common.net.membership import Members
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.secagg.protocol import ClientPolicy, FederationRoot, SumParty
from potluck.secagg.protocol.primitives.cells import cells_of_members

# Rules of the policy ------------------------------------------------------------------------------


_KINDS: Final[dict[SumName, SumKind]] = {
    "total": SumKind.TOTAL,
    "cells": SumKind.CELLS,
    UNSAFE_STEPWISE: SumKind.STEPWISE,
}


def rules_of_counts(policy: DisclosurePolicy) -> ClientPolicy:
    """Return the rules for a secure sum of label counts."""
    return ClientPolicy(
        least_hosts=policy.sum_hosts,
        colluding_hosts=policy.sum_colluding_hosts,
        disclosures=frozenset(_KINDS[name].value for name in policy.sums),
        unprotected=frozenset({SumKind.STEPWISE.value}),
        noisy=frozenset() if policy.exact_sums else frozenset({SumKind.TOTAL, SumKind.CELLS}),
        largest_epsilon=policy.epsilon,
        sensitivity=sensitivity(policy.adjacency),
    )


def rules_of_updates(policy: DisclosurePolicy) -> ClientPolicy:
    """Return the rules for a secure sum of updates."""
    return replace(
        rules_of_counts(policy),
        disclosures=frozenset({SumKind.UPDATE.value}),
        unprotected=frozenset(),
        one_set=policy.sets_per_model == "one",
        runs_per_epoch=policy.masked_runs,
        rounds_per_epoch=policy.masked_rounds,
    )


# Members ------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class SumMembership:
    """A host's part in the membership: its clients' keys, and the members in force.

    in_force: None if the host has no federation root.
    """

    member_key: Path | None
    in_force: MembershipInForce | None
    _root: FederationRoot | None = field(default=None, init=False)
    _parties: dict[str, SumParty] = field(default_factory=dict, init=False)

    def party(self, name: str, policy: DisclosurePolicy) -> SumParty:
        """Return a client as a party of secure sums, with the member list that is in force now.

        Raises DisclosureRefusedError if the client's key or record or the root is missing,
        ConfigurationError if the key can't be used.
        """
        members = self._members
        if self.member_key is None or members is None:
            raise DisclosureRefusedError(
                f"client '{name}' can't take part in secure sums: its host lacks member_key, "
                "federation_root or members; see `potluck pki member`",
                client=name,
            )
        if self._root is None or self._root.members is not members:
            self._root, self._parties = FederationRoot(members), {}
        if name not in self._parties:
            try:
                record = members.record(name, datetime.now(UTC))
            except IdentityError as error:
                raise DisclosureRefusedError(error.message, client=name) from None
            self._parties[name] = SumParty(
                client=name,
                key=key_in_force(self.member_key, name, record),
                root=self._root,
                policy=rules_of_counts(policy),
            )
        return self._parties[name]

    @property
    def revoked(self) -> frozenset[tuple[str, str]]:
        """Revoked member keys, as pairs of client and key."""
        return frozenset() if self._members is None else self._members.revoked

    @property
    def _members(self) -> Members | None:
        return None if self.in_force is None else self.in_force.members


def cell_of(party: SumParty, data_epoch: int, least_hosts: int) -> frozenset[str]:
    """Return the clients of a client's cell; a sum with the client may only include these.

    The host draws the cell itself, from the members that the root signed. Empty if there are too
    few members."""
    members = party.root.members
    cells = cells_of_members(
        members.hosts, members.federation, data_epoch=data_epoch, least_hosts=least_hosts
    )
    return frozenset(next((cell for cell in cells if party.client in cell), ()))
