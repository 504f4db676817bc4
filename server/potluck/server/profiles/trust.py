"""The signatures that the coordinator asks for."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.common.net.membership import Members, profile_statement
from potluck.common.secagg import FederationRoot
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
