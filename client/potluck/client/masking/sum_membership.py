"""The members that a host's clients may be summed with, and the keys the clients sign with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.releases import key_of
from potluck.common.errors import ConfigurationError, DisclosureRefusedError
from potluck.common.net.membership import (
    SignedRecord,
    load_members,
    load_public_key,
    read_member_file,
)
from potluck.common.secagg import FederationRoot, SumParty, record_bytes
from potluck.common.secagg.primitives.cells import cells_of_members


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The files a host needs to take part: its clients' keys and records, and the root."""

    federation: str
    member_key: Path | None
    members: Path | None
    federation_root: Path | None

    def party(self, name: str, policy: DisclosurePolicy) -> SumParty:
        """A client as the others know it. Raises DisclosureRefusedError where something is missing,
        ConfigurationError where a file can't be used."""
        if self.member_key is None or self.members is None or self.federation_root is None:
            raise DisclosureRefusedError(
                f"client '{name}' takes part in no secure sum: its host has no member_key, members "
                "or federation_root; see `potluck pki member`",
                client=name,
            )
        signed = self._records.get(name)
        if signed is None:
            raise ConfigurationError(
                f"{self.members} has no record of client '{name}'; get the newest one", client=name
            )
        return SumParty(
            client=name,
            key=key_of(self.member_key, name),
            record=record_bytes(signed),
            root=self._root,
            policy=policy.of_sums,
        )

    def cell_of(self, name: str, data_epoch: int, least_hosts: int) -> frozenset[str]:
        """The clients that a client may be summed with by cell: drawn here, from the members that
        the root signed. Empty where too few are members."""
        cells = cells_of_members(
            self._hosts, self.federation, data_epoch=data_epoch, least_hosts=least_hosts
        )
        return frozenset(next((cell for cell in cells if name in cell), ()))

    @cached_property
    def _hosts(self) -> Mapping[str, str]:
        if self.members is None or self.federation_root is None:
            return {}
        members = load_members(self.members, self.federation_root, federation=self.federation)
        return members.hosts

    @cached_property
    def _records(self) -> Mapping[str, SignedRecord]:
        if self.members is None:
            return {}
        return {each.record.client: each for each in read_member_file(self.members).members}

    @cached_property
    def _root(self) -> FederationRoot:
        """One for all clients of the host: it remembers which records it has verified."""
        assert self.federation_root is not None  # noqa: S101  # `party` has looked
        return FederationRoot(self.federation, load_public_key(self.federation_root))
