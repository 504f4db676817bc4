"""The extension point for trainings with noise that hides single records.

The core imports neither the accounting nor the library that clips gradients. It finds both by name
in the group `potluck.integrations`. A private training fails if they are not installed.

A client's ledger is charged before the training begins: afterwards the noise and the batches are
drawn, and an update may leave. So a host that is killed at any moment has charged at least what
it used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.weightings import is_masked
from potluck.common.errors import ProtocolError
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import integration
from potluck.common.trainer import PrivateTraining
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:  # importing them imports torch
    from torch import nn

    from potluck.client.objective import Objective
    from potluck.client.training.steps.loop import TrainingContext, TrainingResult
    from potluck.common.task import Examples

GUARD: Final = "privacy-guard"
"""Name of the class that keeps ledgers, a `PrivacyGuard`."""
LOOP: Final = "private-training"
"""Name of the class that trains, a `PrivateLoop`."""


@dataclass(frozen=True, kw_only=True)
class GrantedTraining:
    """A training that the client's ledger has been charged for.

    sampling_rate: chance of each record to be in a step's batch, in (0, 1]. noise_multiplier:
    standard deviation of the noise, in units of the clip, > 0. steps: ≥ 1. clip: longest gradient
    of a record (L2 norm), > 0. expected_batch: mean number of records in a batch, > 0.
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int
    clip: float
    expected_batch: float


class PrivacyGuard(ABC):
    """Enforces the owner's privacy limits on the trainings of a host's clients.

    Called from several threads. Its methods may block for seconds.
    """

    @abstractmethod
    def __init__(
        self, state: Path, policy: DisclosurePolicy, *, federation: str, coordinator: str
    ) -> None:
        """`state`: the state directory. `federation`, `coordinator`: recipient of the updates."""

    @abstractmethod
    def check(self, client: str, work: rpc.Train) -> None:
        """Check that such a training could be granted; does not check the budget.

        Raises ConfigurationError or ProtocolError."""

    @abstractmethod
    def grant(self, instruction: rpc.Instruction, samples: int) -> GrantedTraining:
        """Charge the client's ledger for a training, synced to disk, and return its terms.

        samples: the client's number of training samples, ≥ 1. Raises DisclosureRefusedError if the
        owner's limit would be exceeded, StorageError if the ledger can't be written, and what
        `check` raises. The ledger has not changed then."""

    @abstractmethod
    def clients(self) -> Sequence[str]:
        """Return the clients that have been charged for a training, sorted."""

    @abstractmethod
    def spent(self, client: str) -> float:
        """Return the ε that a client has spent on trainings on the current version of its data.

        Raises StorageError if its ledger can't be read."""


class PrivateLoop(ABC):
    """Trains with noise, and adds noise in the loops of tasks' own trainers.

    Called in the thread, or the process, that trains."""

    @abstractmethod
    def check(self, model: nn.Module, objective: Objective, settings: LocalTraining) -> None:
        """Raise ConfigurationError if noise can't hide single records in such a training."""

    @abstractmethod
    def train(
        self,
        model: nn.Module,
        data: Examples,
        objective: Objective,
        settings: LocalTraining,
        context: TrainingContext,
        granted: GrantedTraining,
    ) -> TrainingResult:
        """Train the model in place, from the weights it has. Report no loss.

        Raises TrainingError, and RoundClosedError if cancelled."""

    @abstractmethod
    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigurationError if a layer of the model mixes the records of a batch."""

    @abstractmethod
    def noisy_steps(
        self, model: nn.Module, optimizer: Any, data: Any, terms: PrivateTraining
    ) -> AbstractContextManager[tuple[Any, Any]]:
        """Yield an optimizer and batches for a trainer: see `TrainerSettings.noisy_steps`."""


def private_loop() -> PrivateLoop:
    """Return the installed `PrivateLoop`. Raises PluginError or MissingLibraryError."""
    made: PrivateLoop = integration(LOOP)()
    return made


def check_terms(work: rpc.Train) -> None:
    """Raise ProtocolError if a training with noise also asks for something without noise.

    An honest coordinator refuses such a run before it starts; a malicious one may still ask."""
    asked = {
        "a masked update": is_masked(work),
        "numbers reported with the update": bool(work.reports),
        "tensors beside the weights": work.HasField("auxiliary"),
        "limits on the samples of a class": bool(work.quotas),
        "a question before the upload": work.HasField("before_upload"),
        "a model of the client's own": work.HasField("personal"),
        "a part of the model": work.HasField("part"),
    }
    for what, found in asked.items():
        if found:
            raise ProtocolError(
                f"a training with noise asks for {what}, which has none; remove one of them from "
                "the run file"
            )
