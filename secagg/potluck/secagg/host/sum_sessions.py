"""A host's part in secure sums: drives the clients' state machines and writes their ledgers.

Runs on the event loop. The client's state machine in `potluck.secagg.protocol` enforces the
protocol's rules. This module provides the owner's policy, keys, data, time and randomness, and
stores the ledger. A session exists in memory only; after a restart, the host answers that it has
lost the session.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import structlog

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.privacy_budget import PrivacyBudget
from potluck.client.handlers.sum_participant import Count
from potluck.client.private_training import UpdateNoise
from potluck.client.training.unmasked_update import Differences
from potluck.common.disclosure import SumKind
from potluck.common.errors import ConfigurationError, ProtocolError, RoundClosedError
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.common.tensors.tensor_files import FileDigest
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import secure_aggregation_pb2 as wire
from potluck.secagg.host.masked_updates import (
    Appointment,
    Appointments,
    expectation,
    kept,
    write_masked,
    write_noisy,
    write_zeros,
)
from potluck.secagg.host.sum_ledger import SumLedger
from potluck.secagg.host.sum_membership import SumMembership, cell_of, rules_of_updates
from potluck.secagg.protocol import (
    ClientSession,
    ClientStep,
    Envelope,
    Expectation,
    Header,
    Masking,
    Purpose,
    Refusal,
    Rule,
    Situation,
    SumParty,
    client,
    decode,
    encode,
)
from potluck.secagg.protocol.rules import BrokenRuleError
from potluck.secagg.protocol.vectors.histograms import encode_counts
from potluck.secagg.protocol.vectors.noise import noise_share
from potluck.secagg.protocol.wire.messages import Invitation, MessageType

log = structlog.get_logger()

COUNTS = "counts"
"""Name of the vector of words that contains the label counts."""

_MOST_SESSIONS = 8
"""Maximum number of simultaneous sessions of one client; an honest coordinator has one."""


@dataclass(kw_only=True)
class _Live:
    """A session in progress. It sums `counts`, or the update of the appointment's training."""

    session: ClientSession
    header: Header
    counts: Sequence[int] = field(default=(), repr=False)
    appointment: Appointment | None = None


@dataclass(kw_only=True)
class SumSessions:
    """Takes part in secure sums for all clients of a host."""

    policy: DisclosurePolicy
    membership: SumMembership
    budget: PrivacyBudget
    ledger: SumLedger
    random: Callable[[int], bytes] = os.urandom
    appointments: Appointments = field(default_factory=Appointments)
    _live: dict[tuple[str, bytes], _Live] = field(default_factory=dict)
    _used: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    _turns: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    async def answer(self, instruction: rpc.Instruction, count: Count) -> rpc.SecureReply:
        """Answer a message of the coordinator for a client; the answer may be a refusal.

        Raises DisclosureRefusedError, ProtocolError, ConfigurationError, StorageError, and what
        `count` raises.
        """
        name, work = instruction.client_id, instruction.secure
        envelope = _received(work.envelope)
        appointment, expected = None, None
        invited = envelope.type is MessageType.INVITATION
        # Read the membership now: below, the session may wait long for the training.
        party = self.membership.party(name, self.policy) if invited else None
        if party is not None and work.update_id:
            appointment = self.appointments.of(name, work.update_id)
            expected = await self.appointments.expectation(name, work.update_id)
        async with self._turns[name]:  # one step at a time, in the order of arrival
            if party is not None and expected is not None:
                return await self._begin(party, envelope, expected, (), appointment)
            if party is not None:
                counts = await count()
                expected = self._of_counts(party, _header(envelope), counts)
                return await self._begin(party, envelope, expected, counts, None)
            live = self._live.get((name, work.session_id))
            if live is None and envelope.type is MessageType.ABORT:
                return rpc.SecureReply()
            if live is None:
                raise ProtocolError(
                    f"client '{name}' does not know this secure sum: the host was restarted "
                    "during the sum, or the sum has ended"
                )
            with self.budget.turn:
                step = client.handle(live.session, envelope, self._situation(name))
                reply = self._take(name, live, step)
        if envelope.type is MessageType.DELIVERY and live.session.masking is not None:
            return await self._until_delivered(live)
        return reply

    # Updates ----------------------------------------------------------------------------------

    async def meet(self, instruction: rpc.Instruction, model: Path) -> None:
        """Set a client's expectation of the sum, before it trains from this model file. The
        client's session can then begin.
        """
        appointment = self.appointments.of(instruction.client_id, instruction.id)
        expected = await asyncio.to_thread(expectation, instruction, model, self.policy.data_epoch)
        if not appointment.expected.done():
            appointment.expected.set_result(expected)

    def close(self, instruction: rpc.Instruction) -> None:
        """End the sum of a training that is over; do nothing if it has none."""
        self.appointments.close(instruction.client_id, instruction.id)

    async def mask(
        self,
        instruction: rpc.Instruction,
        path: Path,
        update: Differences | None,
        report: UpdateReport,
        noise: UpdateNoise | None = None,
    ) -> tuple[FileDigest, str]:
        """Mask an update, or zeros for None, and write its file as soon as masks are agreed on.

        noise: noise that is charged in the ledger and added before masking; None for no noise.
        Returns the file and the client's signed confirmation of it, hexadecimal. Raises
        RoundClosedError if the sum has been given up. Raises ProtocolError if the update is not a
        valid input, DisclosureRefusedError if its privacy loss exceeds the budget, and
        StorageError. The session is then over, since its masks must not be used again.
        """
        name, update_id = instruction.client_id, instruction.id
        appointment = self.appointments.of(name, update_id)
        await kept(appointment.agreed)
        live = self._live.get((name, appointment.session_id))
        masking = None if live is None else live.session.masking
        if live is None or masking is None or live.appointment is not appointment:
            raise RoundClosedError("the coordinator has given up the secure sum for this update")
        try:
            if noise is not None:
                file = await asyncio.to_thread(write_noisy, path, update, masking, noise)
            elif update is None:
                file = await asyncio.to_thread(write_zeros, path, masking)
            else:
                file = await asyncio.to_thread(write_masked, path, update, report, masking)
        except BaseException as error:
            broken = error.refusal if isinstance(error, BrokenRuleError) else _NO_UPDATE
            step = client.refuse(live.session, broken)
            self._take(name, live, step)
            self.appointments.close(name, update_id, step.replies)
            await appointment.said.wait()  # first send the coordinator the reason, then raise
            raise
        if live.session.masking is not masking:
            raise RoundClosedError("the coordinator has given up the secure sum for this update")
        step = client.uploaded(live.session, bytes.fromhex(file.blake3))
        live.session = step.session
        return file, encode(step.replies[0]).hex()

    async def _until_delivered(self, live: _Live) -> rpc.SecureReply:
        """Signal that masks are agreed on; return the last replies once the training is over."""
        appointment = live.appointment
        assert appointment is not None  # noqa: S101  # counts are masked at once
        appointment.session_id = live.header.session_id
        if not appointment.agreed.done():
            appointment.agreed.set_result(None)
        try:
            replies = await kept(appointment.over)
            return _reply(replies)
        finally:
            appointment.said.set()

    # Steps ------------------------------------------------------------------------------------

    def _of_counts(self, party: SumParty, header: Header, counts: Sequence[int]) -> Expectation:
        within = None
        if header.disclosure == SumKind.CELLS:
            # Use the owner's minimum, not the header's, so that a coordinator can't change the
            # cells.
            policy = self.policy
            within = cell_of(party, policy.data_epoch, policy.sum_hosts)
        return Expectation(
            within=within,
            purpose=Purpose.HISTOGRAM,
            # The input's name omits the task's name: the same data under another name is the same
            # input.
            input_id=f"labels/epoch {self.policy.data_epoch}",
            lengths={COUNTS: len(counts)},
        )

    async def _begin(
        self,
        party: SumParty,
        envelope: Envelope,
        expected: Expectation,
        counts: Sequence[int],
        appointment: Appointment | None,
    ) -> rpc.SecureReply:
        name = party.client
        if expected.purpose is Purpose.UPDATE:
            rules = rules_of_updates(self.policy)
            if not expected.data:  # with noise, the ε of each sum is charged instead
                rules = replace(rules, one_set=False)
            party = replace(party, policy=rules)
        header = _header(envelope)
        self._make_room(name)
        situation = self._situation(name)
        known = {bytes.fromhex(each.session_id) for each in situation.ledger.uploads}
        step = client.begin(
            party,
            envelope,
            expected,
            situation,
            used=known | self._used[name],
            others=[live.session for key, live in self._live.items() if key[0] == name],
        )
        self._used[name].add(header.session_id)
        for session_id in step.superseded:
            earlier = self._live.pop((name, session_id))
            if earlier.appointment is not None and earlier.appointment is not appointment:
                earlier.appointment.close()
        live = _Live(session=step.session, header=header, counts=counts, appointment=appointment)
        return self._take(name, live, step)

    def _take(self, name: str, live: _Live, step: ClientStep) -> rpc.SecureReply:
        """Store a step's ledger entries and session, then return its replies."""
        if step.entries:
            self.ledger.keep(name, step.entries)  # must be on disk before a reply is sent
            self.budget.show(name)
        live.session, replies, masked = step.session, step.replies, b""
        if step.session.masking is not None and live.appointment is None:
            step, masked = self._mask(name, live, step.session.masking)
            live.session, replies = step.session, step.replies
        key = (name, live.header.session_id)
        if live.session.over:
            self._live.pop(key, None)
        else:
            self._live[key] = live
        self._tell(name, live, step)
        if step.refusal is not None and not replies:
            raise ProtocolError(f"client '{name}' refused a secure sum: {step.refusal}")
        return _reply(replies, masked)

    def _mask(self, name: str, live: _Live, masking: Masking) -> tuple[ClientStep, bytes]:
        """Mask the label counts; return the next step and the masked counts.

        If the counts are not a valid input, the step is a refusal and the masked counts are empty.
        """
        header = live.header
        noise = (
            None
            if header.noise is None
            else noise_share(header.noise, len(live.counts), self._source_of_noise(name, header))
        )
        try:
            words = encode_counts(live.counts, header.vector(COUNTS), noise)
        except BrokenRuleError as error:
            return client.refuse(live.session, error.refusal), b""
        masking.add_masks(COUNTS, words)
        masked = words.tobytes()
        return client.uploaded(live.session, hashlib.sha256(masked).digest()), masked

    def _source_of_noise(self, name: str, header: Header) -> Callable[[int], bytes]:
        """Return the randomness of a client's noise: the system's, except in a simulation."""
        policy = self.policy
        if policy.simulation_seed is None:
            return self.random
        terms = f"{header.disclosure}/{header.noise}/{policy.data_epoch}"
        return random.Random(f"{policy.simulation_seed}/{name}/{terms}").randbytes

    def _situation(self, name: str) -> Situation:
        return Situation(
            now=datetime.now(UTC),
            random=self.random,
            ledger=self.ledger.of(name).model_copy(
                update={"epsilon_budget": self.budget.for_sums(name)}
            ),
            revoked=self.membership.revoked,
        )

    def _make_room(self, name: str) -> None:
        """Forget expired sessions; if none has expired, the oldest, so that one more is allowed."""
        now = datetime.now(UTC).timestamp()
        mine = [key for key in self._live if key[0] == name]
        expired = [key for key in mine if self._live[key].header.expires_at <= now]
        for key in expired or mine[: max(0, len(mine) - _MOST_SESSIONS + 1)]:
            del self._live[key]

    def _tell(self, name: str, live: _Live, step: ClientStep) -> None:
        header = live.header
        bound = log.bind(client=name, run=header.run, session=header.session_id.hex())
        if step.refusal is not None:
            bound.warning(
                f"refused to take part in a secure sum of {header.subject}", why=str(step.refusal)
            )
        for release in (e for e in self.ledger.of(name).releases[-1:] if live.session.over):
            if release.session_id == header.session_id.hex():
                bound.info(
                    f"secure sum of {header.subject}: client {name} is one of "
                    f"{len(release.clients)} clients on {len(set(release.clients.values()))} "
                    f"hosts, for run {header.run}"
                )


_NO_UPDATE = Refusal(Rule.INPUT, "the update could not be masked")


def _reply(replies: Sequence[Envelope], masked: bytes = b"") -> rpc.SecureReply:
    envelopes = [wire.SecureEnvelope.FromString(encode(reply)) for reply in replies]
    return rpc.SecureReply(envelopes=envelopes, masked=masked)


def _received(message: wire.SecureEnvelope) -> Envelope:
    return decode(Envelope, message.SerializeToString(deterministic=True))


def _header(envelope: Envelope) -> Header:
    return decode(Header, decode(Invitation, envelope.payload).header)


def sums_of_host(
    policy: DisclosurePolicy,
    member_key: Path | None,
    in_force: MembershipInForce | None,
    budget: PrivacyBudget,
) -> SumSessions:
    """Return a host's part in secure sums. Raises ConfigurationError if the budget has records of
    another package."""
    ledger = budget.sums
    if not isinstance(ledger, SumLedger):
        raise ConfigurationError(
            "the privacy budget has a ledger of secure sums from another "
            "package than potluck.secagg"
        )
    membership = SumMembership(member_key=member_key, in_force=in_force)
    return SumSessions(policy=policy, membership=membership, budget=budget, ledger=ledger)
