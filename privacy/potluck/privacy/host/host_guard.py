"""The host's guard: allows trainings with noise, and noisy answers, within the owner's limits."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from potluck.client.base.state_directory import PRIVACY
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.privacy_budget import PrivacyBudget
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
from potluck.client.question import BoundedSums
from potluck.client.training.plugin_options import json_object
from potluck.common.disclosure import LARGEST_CLIP, SMALLEST_CLIP, Weighting
from potluck.common.errors import (
    ConfigurationError,
    DataError,
    DisclosureRefusedError,
    ProtocolError,
    ProtocolVersionError,
    TrainingError,
)
from potluck.common.records.privacy_loss import BUDGET_SPENT, NO_ANSWER
from potluck.common.settings.configuration import validate
from potluck.common.settings.extras import require
from potluck.common.settings.local_training import LocalTraining
from potluck.common.tensors.digest import digest_of
from potluck.privacy.accounting import GaussianSteps, rdp_of
from potluck.privacy.host.answer_noise import noisy_means
from potluck.privacy.host.client_noise import ClientNoise
from potluck.privacy.host.privacy_ledger import (
    Charge,
    ChargedAnswer,
    ChargedTraining,
    PrivacyLedger,
    Unit,
)
from potluck.privacy.planned_training import answer_noise, planned_event
from potluck.privacy.rdp_filter import RdpFilter
from potluck.rpc.v1 import coordinator_pb2 as rpc

log = structlog.get_logger()

UNITS: Final[tuple[Unit, ...]] = (RECORD, CLIENT)
"""Units that noise can hide; each has its own limit."""


class HostGuard(PrivacyGuard):
    """The ledgers of a host's clients, and the limits of the data's owner."""

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
        `budget`: privacy loss of profiles and secure sums in this process; None to read it from the
        state directory.

        Raises MissingLibraryError if the accounting is not installed."""
        require("dp_accounting", "potluck[privacy]")
        self._policy = policy
        self._federation, self._coordinator = federation, coordinator
        (state / PRIVACY).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ledger = PrivacyLedger(state / PRIVACY)
        self._budget = budget or PrivacyBudget(state, policy)
        self._turn = self._budget.turn

    def check(self, client: str, work: rpc.Train) -> None:
        """Check that a training's terms are allowed; does not check the budget."""
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
            counted_share=asked.counted_share,
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
        """Raise DisclosureRefusedError if an event would exceed a limit.

        charges: if True, and the limits allow the event, add it to the ledger, synced to disk."""
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
        for each in UNITS:
            in_unit = charged.event_in(each)
            if in_unit is not None:
                rdp_of(in_unit)  # fill its cache here: it takes seconds, too long for the lock
        with self._turn:
            why = self._excess(client, charged, asked)
            if not why and charges:
                self._ledger.charge(client, charged)
        if why:
            raise _refusal(client, charged, why)

    def _excess(self, client: str, charged: Charge, asked: rpc.Privacy) -> str:
        """Describe the limit that a charge would exceed; empty if it exceeds none."""
        charges = self._ledger.of(client)
        of_run = [each for each in charges if each.recipient == charged.recipient]
        in_run = sum(each.kind == charged.kind for each in of_run)
        most = asked.trainings if charged.kind == "training" else asked.answers
        if asked.epsilon and in_run >= most:
            return (
                f"the run's epsilon allows {most} {charged.kind}s, and the client has already "
                f"made {in_run}"
            )
        for unit in UNITS:
            event = charged.event_in(unit)
            before = spent_in_epoch(charges, self._policy, unit)
            if event is not None and not before.admits(event):
                after = before.with_event(event).epsilon_spent
                return (
                    f"one more {charged.kind} would raise ε per {unit} from "
                    f"{before.epsilon_spent:.4g} to {after:.4g}, and training_epsilon or "
                    f"total_epsilon allows {self._policy.training_limit:g}"
                )
        event = charged.event_in(RECORD)
        if self._policy.total_epsilon is None or event is None:
            return ""
        together = spent_together(charges, self._budget.pure(client), self._policy)
        if together.admits(event):
            return ""
        after = together.with_event(event).epsilon_spent
        return (
            f"one more {charged.kind} would raise ε per record, for everything with noise, from "
            f"{together.epsilon_spent:.4g} to {after:.4g}, and total_epsilon allows "
            f"{self._policy.total_epsilon:g}"
        )

    def room(self, client: str, pure: Sequence[Fraction]) -> Fraction:
        """Return the largest ε of one more profile or sum that `together_limit` allows."""
        with self._turn:
            return spent_together(self._ledger.of(client), pure, self._policy).pure_room

    def kept_answer(self, instruction: rpc.Instruction) -> Mapping[str, float] | None:
        """Return the stored answer to a question that was asked before; None if it is new.

        Raises DisclosureRefusedError if it is new and a limit does not allow the answer.
        """
        charged = self._charged_answer(instruction, {})
        with self._turn:
            return self._kept(instruction.client_id, charged, instruction.question.privacy)

    def answer(
        self, instruction: rpc.Instruction, sums: BoundedSums, samples: int
    ) -> Mapping[str, float]:
        """Return a noisy answer and charge the client's ledger; a stored answer costs nothing."""
        asked, client = instruction.question.privacy, instruction.client_id
        without_numbers = self._charged_answer(instruction, {})
        if samples < 1:
            raise DataError("the client has no training samples; remove it from this federation")
        numbers = (*sums.values.values(), *sums.public.values())
        if not (0 < sums.sensitivity < math.inf and all(map(math.isfinite, numbers))):
            raise TrainingError(
                f"the client's values for question '{instruction.question.kind}' are NaN or "
                "infinite"
            )
        with self._turn:
            kept = self._kept(client, without_numbers, asked)
            if kept is not None:
                return kept
            answer = noisy_means(
                sums,
                samples,
                public=self._policy.weighting is Weighting.EXACT,
                noise_multiplier=without_numbers.noise_multiplier,
                random=os.urandom,
            )
            self._ledger.charge(client, self._charged_answer(instruction, answer))
        return answer

    def _charged_answer(
        self, instruction: rpc.Instruction, numbers: Mapping[str, float]
    ) -> ChargedAnswer:
        """Return the ledger line of an answer. Raises ProtocolError if its noise is not valid."""
        work = instruction.question
        check_answer_noise(work.privacy)
        return ChargedAnswer(
            data_epoch=self._policy.data_epoch,
            noise_multiplier=answer_noise(work.privacy),
            question=work.kind,
            work=_digest_of_question(work),
            numbers=numbers,
            federation=self._federation,
            coordinator=self._coordinator,
            run=instruction.run_id,
            round=instruction.round,
            at=datetime.now(UTC),
        )

    def _kept(
        self, client: str, charged: ChargedAnswer, asked: rpc.Privacy
    ) -> Mapping[str, float] | None:
        """Return the stored answer to the same question; None if the limits allow a new answer.

        Raises DisclosureRefusedError if there is none and a limit does not allow a new one.
        """
        charges = self._ledger.of(client)
        for each in charges:
            same_data = each.data_epoch == charged.data_epoch
            if isinstance(each, ChargedAnswer) and same_data and each.work == charged.work:
                return each.numbers
        why = self._excess(client, charged, asked)
        if why:
            raise _refusal(client, charged, why)
        return None


def _refusal(client: str, charged: Charge, why: str) -> DisclosureRefusedError:
    """Log which limit refuses a charge; return the error for the coordinator."""
    log.warning(
        f"{charged.kind} with noise refused",
        client=client,
        run=charged.run,
        round=charged.round,
        why=why,
    )
    fixed = BUDGET_SPENT if charged.kind == "training" else NO_ANSWER
    return DisclosureRefusedError(f"client '{client}': {fixed}", client=client)


def spent_in_epoch(
    charges: Sequence[Charge], policy: DisclosurePolicy, unit: Unit = RECORD
) -> RdpFilter:
    """Return a client's filter with all charges of the current data epoch.

    Charges whose noise does not hide the unit are omitted."""
    found = RdpFilter(epsilon=policy.training_limit, delta=policy.training_delta)
    current = [each for each in charges if each.data_epoch == policy.data_epoch]
    events = (each.event_in(unit) for each in current)
    return found.with_events(each for each in events if each is not None)


def spent_together(
    charges: Sequence[Charge], pure: Sequence[Fraction], policy: DisclosurePolicy
) -> RdpFilter:
    """Return the filter for single records, with all trainings, answers, profiles and secure sums.

    pure: ε of each profile and sum, from all data epochs, since new versions of data mostly hold
    the same samples. A profile or sum hides the replacement of a record, or its presence. With the
    noise of these disclosures, hiding a replacement costs at least as much ε as hiding presence, so
    the recorded ε holds for both.
    """
    found = replace(spent_in_epoch(charges, policy), epsilon=policy.together_limit)
    return found.with_pure(pure)


def counted_samples(samples: int, weighting: Weighting) -> int:
    """Return the number of samples that gives a training's sampling rate and steps.

    It is the exact number if the data's owner discloses it, else the next power of two."""
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
    numbers = [asked.delta, asked.epsilon if solves else asked.noise_multiplier]
    valid = all(math.isfinite(each) and each > 0 for each in numbers) and asked.delta < 1
    valid = valid and SMALLEST_CLIP <= asked.clip <= LARGEST_CLIP
    valid = valid and 0 <= asked.counted_share <= 0.5 * whole
    valid = valid and not (solves and whole)  # noise on whole updates: the coordinator computes it
    if not valid or (solves and asked.trainings < 1):
        raise ProtocolError(
            f"the noise of a training is not valid: privacy needs clip (from {SMALLEST_CLIP:g} to "
            f"{LARGEST_CLIP:g}), delta, and either noise_multiplier or epsilon with trainings; set "
            "them in the run file"
        )


def check_answer_noise(asked: rpc.Privacy) -> None:
    """Raise ProtocolError if the noise that a question asks for is not valid."""
    check_noise(asked)
    noise = asked.answer_noise_multiplier or asked.epsilon
    valid = math.isfinite(noise) and noise > 0
    valid = valid and SMALLEST_CLIP <= asked.answer_clip <= LARGEST_CLIP
    if not valid or asked.answers < 1 or asked.unit != RECORD:
        raise ProtocolError(
            'the noise of an answer is not valid: privacy needs unit = "record", answer_clip (from '
            f"{SMALLEST_CLIP:g} to {LARGEST_CLIP:g}), and either answer_noise_multiplier or "
            "epsilon with answers; set them in the run file"
        )


def _digest_of_question(asked: rpc.Question) -> str:
    """Return a digest that is equal for all questions with the same answer."""
    question = rpc.Question()
    question.CopyFrom(asked)
    question.model.ClearField("renditions")
    question.ClearField("names")
    return digest_of(question.SerializeToString(deterministic=True))


def _settings(work: rpc.Train) -> LocalTraining:
    return validate(
        LocalTraining, json_object(work.training_json, "training_json"), source="training"
    )
