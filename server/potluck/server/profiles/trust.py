"""Verifies the signatures of members on profiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.net.identity import Role
from potluck.common.net.membership import Members, profile_statement
from potluck.common.net.membership_in_force import MembershipInForce, MembersListener
from potluck.server.clock import utc
from potluck.server.config import CoordinatorConfig
from potluck.server.store.records import Profile


@dataclass(kw_only=True)
class Trust:
    """The members whose signatures are accepted.

    membership: the newest member list; None without a federation root. independent: True if the
    operator declared that the root's key is kept apart from the coordinator.
    """

    federation: str
    membership: MembershipInForce | None = None
    independent: bool = False

    @property
    def members(self) -> Members | None:
        """The members in the newest member list; None without a federation root."""
        return None if self.membership is None else self.membership.members

    def is_member(self, client: str) -> bool:
        """Return True if a client has a member record that is valid now. Without a federation root,
        return True for every client."""
        members = self.members
        if members is None:
            return True
        try:
            members.record(client, utc())
        except IdentityError:
            return False
        return True

    def listen(self, listener: MembersListener) -> Callable[[], None]:
        """Register a listener for every newer member list. Call the returned function to unregister
        it."""
        return (lambda: None) if self.membership is None else self.membership.listen(listener)

    def verify(self, profile: Profile) -> None:
        """Raise IdentityError unless a member signed this profile. Without a federation root,
        accept every profile."""
        if self.members is None:
            return
        self.members.verify(
            profile.client_id,
            self.statement(profile),
            profile.signature or b"",
            profile.received_at,
        )

    def statement(self, profile: Profile) -> bytes:
        """Return the text that a member signs to disclose this profile."""
        return profile_statement(
            federation=self.federation,
            client=profile.client_id,
            data_epoch=profile.data_epoch,
            signal=profile.signal,
            parameters_json=profile.parameters_json,
            payload_json=profile.payload_json,
        )


def load_trust(config: CoordinatorConfig) -> Trust:
    """Load the members whose signatures are accepted.

    Raises ConfigurationError, IdentityError, StorageError.
    """
    federation = config.tls.load(Role.COORDINATOR).identity.federation
    if config.federation_root is None and config.members is None:
        return Trust(federation=federation)
    if config.federation_root is None or config.members is None:
        raise ConfigurationError(
            "`federation_root` and `members` need each other; set both, or neither if the "
            "federation has no root"
        )
    membership = MembershipInForce(
        config.federation_root,
        federation=federation,
        file=config.members,
        state_directory=config.state_directory,
    )
    return Trust(federation=federation, membership=membership, independent=config.independent_root)
