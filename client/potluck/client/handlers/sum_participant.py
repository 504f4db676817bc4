"""Interface through which a host takes part in secure sums.

`potluck.secagg` implements it. The host finds it by name, in the entry-point group
`potluck.secure_sums`. Without it, a host refuses every sum, and does not start if its owner's
policy requires masked updates.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.privacy_budget import PrivacyBudget
from potluck.client.private_training import UpdateNoise
from potluck.client.training.unmasked_update import Differences
from potluck.common.errors import ConfigurationError, DisclosureRefusedError
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.common.settings import plugins
from potluck.common.tensors.tensor_files import FileDigest
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc

_HOST: Final = "host"
_MISSING: Final = "this host lacks the package potluck.secagg"

Count = Callable[[], Awaitable[list[int]]]
"""Function that reads the client's data and returns its number of samples per class."""


class SumParticipant(Protocol):
    """Takes part in secure sums for all clients of a host. Runs on the event loop.

    Methods raise DisclosureRefusedError if the owner's policy forbids a sum, ProtocolError,
    ConfigurationError, StorageError, and RoundClosedError if a sum has been given up.
    """

    async def answer(self, instruction: rpc.Instruction, count: Count) -> rpc.SecureReply:
        """Answer a message of the coordinator; the answer may be a refusal."""
        ...

    async def meet(self, instruction: rpc.Instruction, model: Path) -> None:
        """Prepare a client's sum before the client trains from this model file."""
        ...

    async def mask(
        self,
        instruction: rpc.Instruction,
        path: Path,
        update: Differences | None,
        report: UpdateReport,
        noise: UpdateNoise | None = None,
    ) -> tuple[FileDigest, str]:
        """Mask an update and write its file, as soon as clients have agreed on masks.

        update: None if the training failed. Zeros are masked then. noise: noise to charge to the
        ledger and to add before the update is masked; None for no noise. Returns the file and the
        client's signed confirmation of it, hexadecimal.
        """
        ...

    def close(self, instruction: rpc.Instruction) -> None:
        """End the sum of a training that is over; do nothing if the training has no sum."""
        ...


class NoParticipant:
    """Participant of a host without secure aggregation: refuses every sum."""

    async def answer(self, instruction: rpc.Instruction, count: Count) -> rpc.SecureReply:  # noqa: ARG002  # as in `SumParticipant`
        """Refuse: this host has no secure aggregation. Always raises DisclosureRefusedError."""
        raise _refused(instruction)

    async def meet(self, instruction: rpc.Instruction, model: Path) -> None:  # noqa: ARG002  # likewise
        """Refuse, as `answer` does. Always raises DisclosureRefusedError."""
        raise _refused(instruction)

    async def mask(
        self,
        instruction: rpc.Instruction,
        path: Path,  # noqa: ARG002  # likewise
        update: Differences | None,  # noqa: ARG002  # likewise
        report: UpdateReport,  # noqa: ARG002  # likewise
        noise: UpdateNoise | None = None,  # noqa: ARG002  # likewise
    ) -> tuple[FileDigest, str]:
        """Refuse, as `answer` does. Always raises DisclosureRefusedError."""
        raise _refused(instruction)

    def close(self, instruction: rpc.Instruction) -> None:
        """Do nothing."""


def _refused(instruction: rpc.Instruction) -> DisclosureRefusedError:
    return DisclosureRefusedError(
        f"client '{instruction.client_id}' can't take part in secure sums: {_MISSING}; install "
        "all packages of Potluck",
        client=instruction.client_id,
    )


def check_masks(policy: DisclosurePolicy) -> None:
    """Raise ConfigurationError if the policy requires masks and the host can't make them."""
    if policy.updates == "masked" and not _is_installed():
        raise ConfigurationError(
            f'updates = "masked" in [disclosure], but {_MISSING}; install all packages of Potluck'
        )


def open_participant(
    policy: DisclosurePolicy,
    member_key: Path | None,
    in_force: MembershipInForce | None,
    budget: PrivacyBudget,
) -> SumParticipant:
    """Return the host's `SumParticipant`. in_force: None without a federation root."""
    if not _is_installed():
        return NoParticipant()
    make: Callable[..., Any] = plugins.find_callable(plugins.SECURE_SUMS, _HOST)
    found: SumParticipant = make(policy, member_key, in_force, budget)
    return found


def _is_installed() -> bool:
    return plugins.is_present(plugins.SECURE_SUMS, _HOST)
