"""The signatures that the coordinator asks for."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.common.errors import ConfigurationError
from potluck.common.net.identity import Role
from potluck.common.net.membership import Members, load_members, load_public_key, profile_statement
from potluck.common.secagg import FederationRoot
from potluck.server.config import CoordinatorConfig
from potluck.server.store.records import Profile


@dataclass(frozen=True, kw_only=True)
class Trust:
    """The members whose signatures are verified; `members` is None where there is no root.

    root: verifies members of secure sums. independent: whether it is kept apart from the
    coordinator, as its operator says.
    """

    federation: str
    members: Members | None
    root: FederationRoot | None = None
    independent: bool = False

    def verify(self, profile: Profile) -> None:
        """Raises IdentityError unless a member signed this profile; without a root none need."""
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
    """The members whose signatures count. Raises ConfigurationError, IdentityError."""
    federation = config.tls.load(Role.COORDINATOR).identity.federation
    if config.federation_root is None and config.members is None:
        return Trust(federation=federation, members=None)
    if config.federation_root is None or config.members is None:
        raise ConfigurationError(
            "`federation_root` and `members` go together; set both, or neither where the "
            "federation has no root"
        )
    members = load_members(config.members, config.federation_root, federation=federation)
    root = FederationRoot(federation, load_public_key(config.federation_root))
    return Trust(
        federation=federation, members=members, root=root, independent=config.independent_root
    )
