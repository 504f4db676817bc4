"""The members with which a host's clients may be summed, and the clients' signing keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.member_keys import key_in_force
from potluck.common.errors import DisclosureRefusedError, IdentityError
from potluck.common.net.membership import Members, troubles_of
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.common.secagg import FederationRoot, SumParty
from potluck.common.secagg.primitives.cells import cells_of_members

log = structlog.get_logger()

WARNING_SECONDS: Final = 86_400.0
"""Pause between two warnings about member records that expire."""


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
        """Return a client as a party of secure sums, under the membership in force.

        Raises DisclosureRefusedError if a key, the root or the client's record is missing,
        ConfigurationError if its key can't be used."""
        members = self._members
        if self.member_key is None or members is None:
            raise DisclosureRefusedError(
                f"client '{name}' takes part in no secure sum: its host has no member_key, "
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
                policy=policy.of_sums,
            )
        return self._parties[name]

    async def follow(self, clients: Sequence[str]) -> None:
        """Watch the membership's file, and warn about records that expire, until cancelled."""
        if self.in_force is None:
            return
        watching = asyncio.create_task(self.in_force.watch())
        try:
            while True:
                self._warn(clients, self.in_force)
                await asyncio.sleep(WARNING_SECONDS)
        finally:
            watching.cancel()

    def _warn(self, clients: Sequence[str], in_force: MembershipInForce) -> None:
        now = datetime.now(UTC)
        for trouble in troubles_of(in_force.members, clients, now):
            log.warning(trouble)

    @property
    def revoked(self) -> frozenset[tuple[str, str]]:
        """Revoked pairs of a client and its member key."""
        return frozenset() if self._members is None else self._members.revoked

    @property
    def _members(self) -> Members | None:
        return None if self.in_force is None else self.in_force.members


def cell_of(party: SumParty, data_epoch: int, least_hosts: int) -> frozenset[str]:
    """Return the clients of a client's cell, with which it may be summed.

    The cell is drawn here, from the members that the root signed. Empty if there are too few
    members."""
    members = party.root.members
    cells = cells_of_members(
        members.hosts, members.federation, data_epoch=data_epoch, least_hosts=least_hosts
    )
    return frozenset(next((cell for cell in cells if party.client in cell), ()))
