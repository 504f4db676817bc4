"""Verifies the signatures that the coordinator requires."""

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
    """The members whose signatures are verified; `membership` is None without a federation root.

    independent: True if the operator declared that the root is kept apart from the coordinator.
    """

    federation: str
    membership: MembershipInForce | None = None
    independent: bool = False

    @property
    def members(self) -> Members | None:
        """Return the members of the newest membership; None without a federation root."""
        return None if self.membership is None else self.membership.members

    def is_member(self, client: str) -> bool:
        """Return True if a client has a record that is valid now; without a root, for all
        clients."""
        members = self.members
        if members is None:
            return True
        try:
            members.record(client, utc())
        except IdentityError:
            return False
        return True

    def listen(self, listener: MembersListener) -> Callable[[], None]:
        """Register `listener` for every newer membership; call the result to unregister it."""
        return (lambda: None) if self.membership is None else self.membership.listen(listener)

    def verify(self, profile: Profile) -> None:
        """Raise IdentityError unless a member signed this profile; without a root, accept all."""
        if self.members is None:
            return
        signed = profile_statement(
            federation=self.federation,
            client=profile.client_id,
            data_epoch=profile.data_epoch,
            signal=profile.signal,
            parameters_json=profile.parameters_json,
            payload_json=profile.payload_json,
        )
        self.members.verify(
            profile.client_id, signed, profile.signature or b"", profile.received_at
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
