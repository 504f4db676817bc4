"""The extension point for noise that hides single records, or a client's whole update.

The core imports neither the privacy accounting nor the library that clips gradients. It finds both
by name, in the entry-point group `potluck.integrations`. A private training fails if they are not
installed.

A client's privacy loss is recorded in its ledger before noise is drawn: for records before the
training begins, for a whole update before it is masked. So if a host is killed at any moment, its
ledger has at least the privacy loss that occurred.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.privacy_budget import PrivacyBudget
from potluck.client.disclosure.weightings import is_masked
from potluck.common.errors import ProtocolError
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import integration
from potluck.common.trainer import PrivateTraining
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:  # importing torch takes seconds
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from potluck.client.correction import LocalCorrection
    from potluck.client.objective import Objective
    from potluck.client.question import BoundedSums
    from potluck.client.training.steps.loop import Corrected, TrainingContext, TrainingResult
    from potluck.common.task import Examples

GUARD: Final = "privacy-guard"
"""Entry-point name of the class that keeps ledgers, a `PrivacyGuard`."""
LOOP: Final = "private-training"
"""Entry-point name of the class that trains, a `PrivateLoop`."""
RECORD: Final[Literal["record"]] = "record"
"""Unit of noise that hides each record; it is added in the steps of the training."""
CLIENT: Final[Literal["client"]] = "client"
"""Unit of noise that hides a client's whole update."""
CLIENTS: Final = "clients"
"""Source of noise on whole updates: each client adds a share of the noise before masking."""


@dataclass(frozen=True, kw_only=True)
class GrantedTraining:
    """The terms of a training with noise whose privacy loss is in the client's ledger.

    sampling_rate: probability that a record is in a step's batch, in (0, 1]. noise_multiplier:
    standard deviation of the noise, in units of the clip, > 0. steps: ≥ 1. clip: maximum L2 norm of
    a record's gradient, > 0. expected_batch: mean number of records in a batch, > 0.
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int
    clip: float
    expected_batch: float


@dataclass(frozen=True, kw_only=True)
class SumGrid:
    """The whole numbers in which updates enter a masked sum.

    scale: the whole number that stands for a parameter of 1.0, > 0. values: number of parameters
    and counts, ≥ 1. clients: maximum number of clients in the sum. contributors: number of clients
    whose noise is certainly in the sum and secret, ≥ 1. largest: maximum magnitude of a sum that
    does not overflow.
    """

    scale: float
    values: int
    clients: int
    contributors: int
    largest: int


class UpdateNoise(ABC):
    """Bounds one client's update, and hides it in a masked sum. Called from one thread."""

    counts: bool
    """True if the sum has an additional number that counts the updates whose norm was within the
    limit.
    """

    @abstractmethod
    def bound(self, update: NDArray[np.float32]) -> float | None:
        """Scale an update down, in place, to the maximum L2 norm of the run.

        Returns the update's number for the count, positive if its norm was within the limit.
        Returns None if the update has NaN or infinity; it is then unchanged.
        """

    @abstractmethod
    def charge(self, grid: SumGrid) -> Callable[[int], NDArray[np.int64]]:
        """Record the privacy loss of one upload in the client's ledger, synced to disk.

        Returns a function that draws the client's share of the noise for the next parameters.
        Raises DisclosureRefusedError if the owner's limit would be exceeded, ConfigurationError if
        the grid is too coarse or its sums could overflow, and StorageError. The ledger has not
        changed then."""


class PrivacyGuard(ABC):
    """Enforces the owner's privacy limits on the trainings of a host's clients.

    Called from several threads. Its methods may block for seconds.
    """

    @abstractmethod
    def __init__(
        self,
        state: Path,
        policy: DisclosurePolicy,
        *,
        federation: str,
        coordinator: str,
        budget: PrivacyBudget | None = None,
    ) -> None:
        """`state`: the state directory. `federation`, `coordinator`: recipient of the updates.
        `budget`: profiles and sums of this process, for `total_epsilon`; None if there are none.
        """

    @abstractmethod
    def check(self, client: str, work: rpc.Train) -> None:
        """Check that the training `work` could be granted; does not check the budget.

        Raises ConfigurationError or ProtocolError."""

    @abstractmethod
    def grant(self, instruction: rpc.Instruction, samples: int) -> GrantedTraining:
        """Record a training's privacy loss in the client's ledger, synced to disk; return its
        terms.

        samples: the client's number of training samples, ≥ 1. Raises DisclosureRefusedError if the
        owner's limit would be exceeded, StorageError if the ledger can't be written, and what
        `check` raises. The ledger has not changed then."""

    @abstractmethod
    def hide_update(self, instruction: rpc.Instruction) -> UpdateNoise:
        """Return the noise for the update of a training that is about to begin.

        The privacy loss is recorded by `UpdateNoise.charge`. Raises DisclosureRefusedError if the
        owner's limit would be exceeded, and what `check` raises.
        """

    @abstractmethod
    def kept_answer(self, instruction: rpc.Instruction) -> Mapping[str, float] | None:
        """Return the client's stored answer to the same question; None if it may answer now.

        Raises DisclosureRefusedError if there is none and the owner's limit would be exceeded,
        ProtocolError if the noise asked for is not valid, and StorageError."""

    @abstractmethod
    def answer(
        self, instruction: rpc.Instruction, sums: BoundedSums, samples: int
    ) -> Mapping[str, float]:
        """Add noise to sums over a client's records, and return their means.

        Records the privacy loss in the client's ledger and stores the answer, both synced to disk
        before it returns. If the same question is asked again, it returns the stored numbers.
        samples: the client's number of training samples. Raises what `kept_answer` raises; the
        ledger has not changed then.
        """

    @abstractmethod
    def room(self, client: str, pure: Sequence[Fraction]) -> Fraction:
        """Return the largest ε of one more profile or sum; see `TrainingsCharged`."""

    @abstractmethod
    def clients(self) -> Sequence[str]:
        """Return the clients with a training in their ledgers, sorted."""

    @abstractmethod
    def spent(self, client: str) -> float:
        """Return the ε that a client has spent on trainings on the current version of its data.

        Raises StorageError if its ledger can't be read."""


class PrivateLoop(ABC):
    """Trains with noise, and adds noise in the loops of tasks' own trainers.

    Its methods run in the thread, or the process, that trains."""

    @abstractmethod
    def check(
        self,
        model: nn.Module,
        objective: Objective,
        settings: LocalTraining,
        correction: LocalCorrection | None = None,
    ) -> None:
        """Raise ConfigurationError if noise can't hide single records in this training."""

    @abstractmethod
    def train(
        self,
        model: nn.Module,
        data: Examples,
        objective: Objective,
        settings: LocalTraining,
        context: TrainingContext,
        granted: GrantedTraining,
        corrected: Corrected | None = None,
    ) -> TrainingResult:
        """Train the model in place, starting from its current weights. Report no loss.

        corrected: the strategy's correction of the noisy gradients.

        Raises TrainingError, and RoundClosedError if cancelled."""

    @abstractmethod
    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigurationError if a layer of the model mixes the records of a batch."""

    @abstractmethod
    def noisy_steps(
        self, model: nn.Module, optimizer: Any, data: Any, terms: PrivateTraining
    ) -> AbstractContextManager[tuple[Any, Any]]:
        """Yield an optimizer and batches for a trainer: see `TrainerSettings.noisy_steps`."""


def made_once(make: Callable[[], PrivacyGuard]) -> Callable[[], PrivacyGuard]:
    """Return a function that makes a guard when it is first called, in any thread.

    Each host needs exactly one: a second guard would overwrite the charges of the first."""
    once, turn = lru_cache(maxsize=1)(make), threading.Lock()

    def guard() -> PrivacyGuard:
        with turn:
            return once()

    return guard


def private_loop() -> PrivateLoop:
    """Return the installed `PrivateLoop`. Raises PluginError or MissingLibraryError."""
    made: PrivateLoop = integration(LOOP)()
    return made


def hides_records(work: rpc.Train) -> bool:
    """Return True if the steps of a training have noise that hides single records."""
    return work.HasField("privacy") and work.privacy.unit == RECORD


def hides_update(work: rpc.Train) -> bool:
    """Return True if the client adds noise to its whole update before it is masked."""
    noise = work.privacy
    return work.HasField("privacy") and (noise.unit, noise.noise) == (CLIENT, CLIENTS)


def check_terms(work: rpc.Train) -> None:
    """Raise ProtocolError if a training with noise also requests results without noise.

    An honest coordinator refuses such a run before it starts; a malicious one may send the
    request."""
    whole = hides_update(work)
    if whole and not is_masked(work):
        raise ProtocolError(
            "noise that all clients add together needs masked updates, but the update is not "
            "masked; set secure_aggregation = true in the run file"
        )
    asked = {
        "a normalised update": work.normalized and whole,
        "numbers reported with the update": bool(work.reports),
        "tensors beside the weights": work.HasField("auxiliary") and whole,
        "a part of the model": work.HasField("part") and whole,
        "limits on the samples of a class": bool(work.quotas),
        "a question before the upload": work.HasField("before_upload"),
        "a model of the client's own": work.HasField("personal"),
    }
    for what, found in asked.items():
        if found:
            raise ProtocolError(
                f"a training with noise is not compatible with {what}; remove this, or "
                "[privacy], from the run file"
            )
