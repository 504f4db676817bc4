"""Interface through which a host checks the selections that a coordinator has committed to.

`potluck.verifiable` implements it. The host finds it by name, in the entry-point group
`potluck.integrations`. Without it, a host refuses to train in runs that commit to selections.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final, Protocol

from potluck.common.errors import ProtocolVersionError
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.common.settings import plugins
from potluck.rpc.v1 import coordinator_pb2 as rpc

GUARD: Final = "selection-guard"
"""Name of the class that checks selections, in the group of integrations."""


class SelectionGuard(Protocol):
    """Checks the selections of runs that commit to them. Methods may be called in any thread, and
    block."""

    def take(self, instruction: rpc.Instruction) -> rpc.SelectionReceipt:
        """Check and store a document about a selection; return the receipt to send.

        Raises ProtocolError if the coordinator did not keep to its commitments, ConfigurationError,
        StorageError.
        """
        ...

    def check(self, instruction: rpc.Instruction) -> None:
        """Check that a training belongs to the selection that the coordinator committed to, and is
        the client's only training by it.

        Raises ProtocolError if the client was not selected, has another training by this selection,
        or if the run commits to its selections and the training names none. Raises StorageError.
        """
        ...


class NoGuard:
    """Guard of a host without `potluck.verifiable`: refuses runs that commit to selections."""

    def take(self, instruction: rpc.Instruction) -> rpc.SelectionReceipt:
        """Refuse: this host can't check selections. Always raises ProtocolVersionError."""
        raise _missing(instruction)

    def check(self, instruction: rpc.Instruction) -> None:
        """Raise ProtocolVersionError if the training names a selection."""
        if instruction.train.HasField("selection"):
            raise _missing(instruction)


def _missing(instruction: rpc.Instruction) -> ProtocolVersionError:
    return ProtocolVersionError(
        f"run {instruction.run_id[:40]} has verifiable selections, but this host lacks the "
        "package potluck.verifiable; install all packages of Potluck"
    )


def open_guard(
    state_directory: Path,
    member_key: Path | None,
    in_force: MembershipInForce | None,
    clients: Collection[str],
) -> SelectionGuard:
    """Return the host's checks of selections. in_force: None without a federation root. clients:
    the clients of this host."""
    if not plugins.is_present(plugins.INTEGRATIONS, GUARD):
        return NoGuard()
    opened = plugins.integration(GUARD)
    found: SelectionGuard = opened(state_directory, member_key, in_force, clients)
    return found
