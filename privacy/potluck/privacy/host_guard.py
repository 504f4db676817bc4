"""The host's guard: grants a training with noise if its owner's limit allows it."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from potluck.client.base.state_directory import PRIVACY
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.handlers.instruction_log import digest_of_training
from potluck.client.private_training import GrantedTraining, PrivacyGuard, check_terms
from potluck.client.training.plugin_options import json_object
from potluck.common.disclosure import Weighting
from potluck.common.errors import (
    ConfigurationError,
    DataError,
    DisclosureRefusedError,
    ProtocolError,
    ProtocolVersionError,
)
from potluck.common.records.privacy_loss import BUDGET_SPENT
from potluck.common.settings.configuration import validate
from potluck.common.settings.extras import require
from potluck.common.settings.local_training import LocalTraining
from potluck.privacy.planned_training import planned_event
from potluck.privacy.privacy_ledger import ChargedTraining, PrivacyLedger
from potluck.privacy.rdp_filter import RdpFilter
from potluck.rpc.v1 import coordinator_pb2 as rpc

log = structlog.get_logger()

RECORD: Final = "record"


class HostGuard(PrivacyGuard):
    """The ledgers of a host's clients, and their owner's limits."""

    def __init__(
        self, state: Path, policy: DisclosurePolicy, *, federation: str, coordinator: str
    ) -> None:
        """`state`: the state directory. `federation`, `coordinator`: recipient of the updates.

        Raises MissingLibraryError if the accounting is not installed."""
        require("dp_accounting", "potluck[privacy]")
        self._policy = policy
        self._federation, self._coordinator = federation, coordinator
        (state / PRIVACY).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ledger = PrivacyLedger(state / PRIVACY)
        self._turn = threading.Lock()

    def check(self, client: str, work: rpc.Train) -> None:
        """Check that such a training could be granted; does not check the budget."""
        del client
        check_terms(work)
        check_noise(work.privacy)
        settings = _settings(work)
        if settings.unfit_for_noise:
            raise ConfigurationError(settings.unfit_for_noise)

    def grant(self, instruction: rpc.Instruction, samples: int) -> GrantedTraining:
        """Charge the client's ledger for a training and return its terms."""
        work, client = instruction.train, instruction.client_id
        self.check(client, work)
        if samples < 1:
            raise DataError("the client has no training samples; remove it from this federation")
        with self._turn:
            trainings = self._ledger.of(client)
            settings, asked = _settings(work), work.privacy
            counted = counted_samples(samples, self._policy.weighting)
            event = planned_event(asked, settings, counted)
            charged = ChargedTraining(
                data_epoch=self._policy.data_epoch,
                sampling_rate=event.sampling_rate,
                noise_multiplier=event.noise_multiplier,
                steps=event.steps,
                work=digest_of_training(instruction),
                federation=self._federation,
                coordinator=self._coordinator,
                run=instruction.run_id,
                round=instruction.round,
                at=datetime.now(UTC),
            )
            self._require_room(client, trainings, charged, asked)
            self._ledger.charge(client, charged)
        return GrantedTraining(
            sampling_rate=event.sampling_rate,
            noise_multiplier=event.noise_multiplier,
            steps=event.steps,
            clip=asked.clip,
            expected_batch=event.sampling_rate * counted,
        )

    def clients(self) -> Sequence[str]:
        """Return the clients that have a ledger, sorted."""
        return self._ledger.clients()

    def spent(self, client: str) -> float:
        """Return the ε that a client has spent on trainings on the current version of its data."""
        with self._turn:
            return spent_in_epoch(self._ledger.of(client), self._policy).epsilon_spent

    def _require_room(
        self,
        client: str,
        trainings: Sequence[ChargedTraining],
        charged: ChargedTraining,
        asked: rpc.Privacy,
    ) -> None:
        """Raise DisclosureRefusedError if a limit does not allow the training."""
        before = spent_in_epoch(trainings, self._policy)
        in_run = sum(each.recipient == charged.recipient for each in trainings)
        why = ""
        if asked.epsilon and in_run >= asked.trainings:
            why = f"the run's epsilon is for {asked.trainings} trainings; {in_run} are charged"
        elif not before.admits(charged.event):
            after = before.with_event(charged.event).epsilon_spent
            why = (
                f"ε would be {after:.4g} after it, and training_epsilon is "
                f"{self._policy.training_epsilon:g}"
            )
        if not why:
            return
        log.warning(
            "training with noise refused",
            client=client,
            run=charged.run,
            round=charged.round,
            why=why,
            spent=round(before.epsilon_spent, 6),
        )
        raise DisclosureRefusedError(f"client '{client}': {BUDGET_SPENT}", client=client)


def spent_in_epoch(trainings: Sequence[ChargedTraining], policy: DisclosurePolicy) -> RdpFilter:
    """Return the filter of a client after its trainings on the current version of the data."""
    found = RdpFilter(epsilon=policy.training_epsilon, delta=policy.training_delta)
    current = policy.data_epoch
    return found.with_events(each.event for each in trainings if each.data_epoch == current)


def counted_samples(samples: int, weighting: Weighting) -> int:
    """Return the number of samples from which the sampling rate and the steps follow.

    It is the exact number if the owner discloses that, otherwise rounded up to a power of two."""
    return samples if weighting is Weighting.EXACT else 1 << (samples - 1).bit_length()


def check_noise(asked: rpc.Privacy) -> None:
    """Raise ProtocolError if the noise that a training asks for is not valid."""
    if asked.unit != RECORD:
        raise ProtocolVersionError(
            f"this host's software can't hide '{asked.unit[:40]}' with noise, only '{RECORD}'; "
            "set privacy.unit in the run file"
        )
    solves = not asked.noise_multiplier
    numbers = [asked.clip, asked.delta, asked.epsilon if solves else asked.noise_multiplier]
    valid = all(math.isfinite(each) and each > 0 for each in numbers) and asked.delta < 1
    if not valid or (solves and asked.trainings < 1):
        raise ProtocolError(
            "the noise of a training is not valid: privacy needs clip, delta, and either "
            "noise_multiplier or epsilon with trainings; set them in the run file"
        )


def _settings(work: rpc.Train) -> LocalTraining:
    return validate(
        LocalTraining, json_object(work.training_json, "training_json"), source="training"
    )
