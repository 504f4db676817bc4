"""The federation root with the members in force, used by sessions to verify signatures."""

from __future__ import annotations

from potluck.common.errors import RunError
from potluck.secagg.protocol import FederationRoot
from potluck.server.profiles.trust import Trust


class RootInForce:
    """The root of a federation with its current members, rebuilt when the membership changes."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._root: FederationRoot | None = None

    @property
    def now(self) -> FederationRoot | None:
        """Return the root; None if the federation has none, so that members can't be verified."""
        members = self._trust.members
        if members is None:
            return None
        if self._root is None or self._root.members is not members:
            self._root = FederationRoot(members)
        return self._root

    def require(self) -> FederationRoot:
        """Return the root. Raises RunError if the federation has none."""
        root = self.now
        if root is None:
            raise RunError(
                "the federation has no root: set federation_root and members of the coordinator"
            )
        return root
