"""The host's guard: grants noise for a training or an update if its owner's limit allows it."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from potluck.client.base.state_directory import PRIVACY
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.handlers.instruction_log import digest_of_training
from potluck.client.private_training import (
    CLIENT,
    CLIENTS,
    RECORD,
    GrantedTraining,
    PrivacyGuard,
    UpdateNoise,
    check_terms,
    hides_records,
)
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
from potluck.privacy.accounting import GaussianSteps
from potluck.privacy.client_noise import ClientNoise
from potluck.privacy.planned_training import planned_event
from potluck.privacy.privacy_ledger import ChargedTraining, PrivacyLedger, Unit
from potluck.privacy.rdp_filter import RdpFilter
from potluck.rpc.v1 import coordinator_pb2 as rpc

log = structlog.get_logger()

UNITS: Final[tuple[Unit, ...]] = (RECORD, CLIENT)
"""Units with a limit each."""


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
        check_noise(work.privacy)
        check_terms(work)
        settings = _settings(work)
        if hides_records(work) and settings.unfit_for_noise:
            raise ConfigurationError(settings.unfit_for_noise)

    def grant(self, instruction: rpc.Instruction, samples: int) -> GrantedTraining:
        """Charge the client's ledger for a training and return its terms."""
        work, client = instruction.train, instruction.client_id
        self.check(client, work)
        if samples < 1:
            raise DataError("the client has no training samples; remove it from this federation")
        counted = counted_samples(samples, self._policy.weighting)
        event = planned_event(work.privacy, _settings(work), counted)
        self._require_room(instruction, RECORD, event, charges=True)
        return GrantedTraining(
            sampling_rate=event.sampling_rate,
            noise_multiplier=event.noise_multiplier,
            steps=event.steps,
            clip=work.privacy.clip,
            expected_batch=event.sampling_rate * counted,
        )

    def clients(self) -> Sequence[str]:
        """Return the clients that have a ledger, sorted."""
        return self._ledger.clients()

    def spent(self, client: str) -> float:
        """Return the ε that a client has spent on trainings on the current version of its data."""
        with self._turn:
            return spent_in_epoch(self._ledger.of(client), self._policy).epsilon_spent

    def hide_update(self, instruction: rpc.Instruction) -> UpdateNoise:
        """Return the noise for an update if the client's ledger has room for it."""
        asked = instruction.train.privacy
        self.check(instruction.client_id, instruction.train)
        self._charge_update(instruction, asked.noise_multiplier, charges=False)
        return ClientNoise(
            clip=asked.clip,
            noise_multiplier=asked.noise_multiplier,
            charge=partial(self._charge_update, instruction),
        )

    def _charge_update(
        self, instruction: rpc.Instruction, noise_multiplier: float, *, charges: bool = True
    ) -> None:
        event = GaussianSteps(noise_multiplier=noise_multiplier)
        self._require_room(instruction, CLIENT, event, charges=charges)

    def _require_room(
        self, instruction: rpc.Instruction, unit: Unit, event: GaussianSteps, *, charges: bool
    ) -> None:
        """Raise DisclosureRefusedError if a limit does not allow an event.

        charges: whether to add the event to the ledger, synced to disk, if the limits allow it."""
        client, asked = instruction.client_id, instruction.train.privacy
        charged = ChargedTraining(
            unit=unit,
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
        with self._turn:
            why = self._excess(self._ledger.of(client), charged, asked)
            if not why and charges:
                self._ledger.charge(client, charged)
        if not why:
            return
        log.warning(
            "training with noise refused",
            client=client,
            run=charged.run,
            round=charged.round,
            why=why,
        )
        raise DisclosureRefusedError(f"client '{client}': {BUDGET_SPENT}", client=client)

    def _excess(
        self, trainings: Sequence[ChargedTraining], charged: ChargedTraining, asked: rpc.Privacy
    ) -> str:
        """Return which limit a training would exceed; empty if none."""
        in_run = sum(each.recipient == charged.recipient for each in trainings)
        if asked.epsilon and in_run >= asked.trainings:
            return f"the run's epsilon is for {asked.trainings} trainings; {in_run} are charged"
        for unit in UNITS:
            event = charged.event_in(unit)
            before = spent_in_epoch(trainings, self._policy, unit)
            if event is not None and not before.admits(event):
                after = before.with_event(event).epsilon_spent
                return (
                    f"ε of a {unit} would be {after:.4g} after it, {before.epsilon_spent:.4g} "
                    f"before, and training_epsilon is {self._policy.training_epsilon:g}"
                )
        return ""


def spent_in_epoch(
    trainings: Sequence[ChargedTraining], policy: DisclosurePolicy, unit: Unit = RECORD
) -> RdpFilter:
    """Return the filter of a client after its trainings on the current version of the data.

    Trainings whose noise does not hide the unit are left out."""
    found = RdpFilter(epsilon=policy.training_epsilon, delta=policy.training_delta)
    current = [each for each in trainings if each.data_epoch == policy.data_epoch]
    events = (each.event_in(unit) for each in current)
    return found.with_events(each for each in events if each is not None)


def counted_samples(samples: int, weighting: Weighting) -> int:
    """Return the number of samples from which the sampling rate and the steps follow.

    It is the exact number if the owner discloses that, otherwise rounded up to a power of two."""
    return samples if weighting is Weighting.EXACT else 1 << (samples - 1).bit_length()


def check_noise(asked: rpc.Privacy) -> None:
    """Raise ProtocolError if the noise that a training asks for is not valid."""
    whole = (asked.unit, asked.noise) == (CLIENT, CLIENTS)
    if asked.unit != RECORD and not whole:
        raise ProtocolVersionError(
            f"this host's software can't hide '{asked.unit[:40]}' with noise of "
            f"'{asked.noise[:40]}'; set privacy.unit and privacy.noise in the run file, or update "
            "the host"
        )
    solves = not asked.noise_multiplier
    numbers = [asked.clip, asked.delta, asked.epsilon if solves else asked.noise_multiplier]
    valid = all(math.isfinite(each) and each > 0 for each in numbers) and asked.delta < 1
    valid = valid and not (solves and whole)  # a coordinator solves for the noise of all clients
    if not valid or (solves and asked.trainings < 1):
        raise ProtocolError(
            "the noise of a training is not valid: privacy needs clip, delta, and either "
            "noise_multiplier or epsilon with trainings; set them in the run file"
        )


def _settings(work: rpc.Train) -> LocalTraining:
    return validate(
        LocalTraining, json_object(work.training_json, "training_json"), source="training"
    )
