"""A host's part in secure sums: drives the clients' state machines, keeps their ledgers.

Lives on the event loop. What a client refuses, its state machine refuses (`common/secagg`); here is
only what that can't do by itself: its own policy and keys, its data, time, randomness and the disk.
A session lives in memory alone; a host that is restarted has lost it, and says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import structlog

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.masked_updates import Appointment, expectation
from potluck.client.disclosure.releases import key_of
from potluck.client.disclosure.sum_ledger import SumLedger
from potluck.common.disclosure import SumKind
from potluck.common.errors import (
    ConfigurationError,
    DisclosureRefusedError,
    ProtocolError,
    RoundClosedError,
)
from potluck.common.net.membership import (
    SignedRecord,
    load_members,
    load_public_key,
    read_member_file,
)
from potluck.common.secagg import (
    ClientSession,
    ClientStep,
    Envelope,
    Expectation,
    FederationRoot,
    Header,
    Ledger,
    Masking,
    Purpose,
    Refusal,
    Rule,
    Situation,
    SumParty,
    client,
    decode,
    encode,
    record_bytes,
)
from potluck.common.secagg.primitives.cells import cells_of_members
from potluck.common.secagg.rules import BrokenRuleError
from potluck.common.secagg.vectors.histograms import encode_counts
from potluck.common.secagg.vectors.noise import noise_share
from potluck.common.secagg.wire.messages import Invitation, MessageType
from potluck.common.tensors.tensor_files import FileDigest
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import secure_aggregation_pb2 as wire

log = structlog.get_logger()
T = TypeVar("T")

COUNTS = "counts"
"""The lane that label counts are in."""

_MOST_SESSIONS = 8
"""Of one client at once; an honest coordinator has one."""

Count = Callable[[], Awaitable[list[int]]]
"""Looks at the client's data: its samples by class."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What a host needs to take part: its clients' keys and records, the root they are under."""

    federation: str
    member_key: Path | None
    members: Path | None
    federation_root: Path | None

    def party(self, name: str, policy: DisclosurePolicy) -> SumParty:
        """A client as the others know it. Raises DisclosureRefusedError where something is missing,
        ConfigurationError where a file can't be used."""
        if self.member_key is None or self.members is None or self.federation_root is None:
            raise DisclosureRefusedError(
                f"client '{name}' takes part in no secure sum: its host has no member_key, members "
                "or federation_root; see `potluck pki member`",
                client=name,
            )
        signed = self._records.get(name)
        if signed is None:
            raise ConfigurationError(
                f"{self.members} has no record of client '{name}'; get the newest one", client=name
            )
        return SumParty(
            client=name,
            key=key_of(self.member_key, name),
            record=record_bytes(signed),
            root=self._root,
            policy=policy.of_sums,
        )

    def cell_of(self, name: str, data_epoch: int, least_hosts: int) -> frozenset[str]:
        """Whom a client may be summed with by cell: drawn here, from the members that the root
        signed. Nobody where too few are members."""
        cells = cells_of_members(
            self._hosts, self.federation, data_epoch=data_epoch, least_hosts=least_hosts
        )
        return frozenset(next((cell for cell in cells if name in cell), ()))

    @cached_property
    def _hosts(self) -> Mapping[str, str]:
        if self.members is None or self.federation_root is None:
            return {}
        members = load_members(self.members, self.federation_root, federation=self.federation)
        return members.hosts

    @cached_property
    def _records(self) -> Mapping[str, SignedRecord]:
        if self.members is None:
            return {}
        return {each.record.client: each for each in read_member_file(self.members).members}

    @cached_property
    def _root(self) -> FederationRoot:
        """One for all clients of the host: it remembers which records it has verified."""
        assert self.federation_root is not None  # noqa: S101  # `party` has looked
        return FederationRoot(self.federation, load_public_key(self.federation_root))


Write = Callable[[Masking], FileDigest]
"""Masks an update and writes its file. Blocks."""


@dataclass(kw_only=True)
class _Live:
    """A session under way, with the counts that go into it, or the training whose update does."""

    session: ClientSession
    header: Header
    counts: Sequence[int] = field(default=(), repr=False)
    appointment: Appointment | None = None


@dataclass(kw_only=True)
class SumSessions:
    """Takes part in secure sums for all clients of a host."""

    policy: DisclosurePolicy
    membership: Membership
    ledger: SumLedger
    spent_otherwise: Callable[[str], Fraction] = lambda _: Fraction(0)
    """The privacy loss of a client's other disclosures, from the same budget."""
    random: Callable[[int], bytes] = os.urandom
    _live: dict[tuple[str, bytes], _Live] = field(default_factory=dict)
    _used: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    _parties: dict[str, SumParty] = field(default_factory=dict)
    _turns: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    _appointments: dict[str, Appointment] = field(default_factory=dict)

    async def answer(self, instruction: rpc.Instruction, count: Count) -> rpc.SecureReply:
        """What a client says to a message of the coordinator; a refusal is part of it.

        Raises DisclosureRefusedError, ProtocolError, ConfigurationError, StorageError, and what
        `count` raises.
        """
        name, work = instruction.client_id, instruction.secure
        envelope = _received(work.envelope)
        appointment, expected = None, None
        if envelope.type is MessageType.INVITATION and work.update_id:
            appointment = self.appointment(work.update_id)
            try:
                expected = await _kept(appointment.expected)
            finally:
                if not appointment.expected.done():  # it was for a training that never came
                    self.missed(work.update_id)
        async with self._turns[name]:  # one step after the other, in the order they came
            if expected is not None:
                return await self._begin(name, envelope, expected, (), appointment)
            if envelope.type is MessageType.INVITATION:
                counts = await count()
                expected = self._of_counts(name, _header(envelope), counts)
                return await self._begin(name, envelope, expected, counts, None)
            live = self._live.get((name, work.session_id))
            if live is None and envelope.type is MessageType.ABORT:
                return rpc.SecureReply()
            if live is None:
                raise ProtocolError(
                    f"client '{name}' knows no such secure sum: its host was restarted meanwhile, "
                    "or the sum is over"
                )
            step = client.handle(live.session, envelope, self._situation(name))
            reply = await self._take(name, live, step)
        if envelope.type is MessageType.DELIVERY and live.session.masking is not None:
            return await self._until_delivered(live)
        return reply

    # Updates ----------------------------------------------------------------------------------

    def appointment(self, update_id: str) -> Appointment:
        """Where a training meets the sum that its update goes into, whichever comes first."""
        return self._appointments.setdefault(update_id, Appointment())

    async def meet(self, instruction: rpc.Instruction, model: Path) -> None:
        """A client is about to train, from this file; its session may begin meanwhile."""
        appointment = self.appointment(instruction.id)
        expected = await asyncio.to_thread(expectation, instruction, model, self.policy.data_epoch)
        if not appointment.expected.done():
            appointment.expected.set_result(expected)

    def missed(self, update_id: str, replies: tuple[Envelope, ...] = ()) -> None:
        """A training is over; nobody will come to its appointment any more."""
        appointment = self._appointments.pop(update_id, None)
        if appointment is not None:
            appointment.close(replies)

    async def mask(self, name: str, update_id: str, write: Write) -> tuple[FileDigest, Envelope]:
        """Have an update masked and written as soon as masks are agreed on.

        Returns its file and the client's signed word for it. Raises RoundClosedError where the sum
        has been given up, ProtocolError where the update is no input to it, and what `write` does;
        then the session is over, as its masks must not be used again.
        """
        appointment = self.appointment(update_id)
        await _kept(appointment.agreed)
        live = self._live.get((name, appointment.session_id))
        masking = None if live is None else live.session.masking
        if live is None or masking is None:
            raise RoundClosedError("the secure sum that the update was for has been given up")
        try:
            file = await asyncio.to_thread(write, masking)
        except BaseException as error:
            broken = error.refusal if isinstance(error, BrokenRuleError) else _NO_UPDATE
            step = client.refuse(live.session, broken)
            await self._take(name, live, step)
            self.missed(update_id, step.replies)
            await appointment.said.wait()  # the round hears why before it hears that
            raise
        if live.session.masking is not masking:
            raise RoundClosedError("the secure sum that the update was for has been given up")
        step = client.uploaded(live.session, bytes.fromhex(file.blake3))
        live.session = step.session
        return file, step.replies[0]

    async def _until_delivered(self, live: _Live) -> rpc.SecureReply:
        """There are masks; the answer is what is left to say when the update is there."""
        appointment = live.appointment
        assert appointment is not None  # noqa: S101  # counts are masked at once
        appointment.session_id = live.header.session_id
        if not appointment.agreed.done():
            appointment.agreed.set_result(None)
        try:
            replies = await _kept(appointment.over)
            return _reply(replies)
        finally:
            appointment.said.set()

    # Steps ------------------------------------------------------------------------------------

    def _of_counts(self, name: str, header: Header, counts: Sequence[int]) -> Expectation:
        within = None
        if header.disclosure == SumKind.CELLS:
            epoch = self.policy.data_epoch
            within = self.membership.cell_of(name, epoch, max(1, header.least_hosts))
        return Expectation(
            within=within,
            purpose=Purpose.HISTOGRAM,
            # Whatever the task is called: two names for the same data must not be two inputs.
            input_id=f"labels/epoch {self.policy.data_epoch}",
            lengths={COUNTS: len(counts)},
        )

    async def _begin(
        self,
        name: str,
        envelope: Envelope,
        expected: Expectation,
        counts: Sequence[int],
        appointment: Appointment | None,
    ) -> rpc.SecureReply:
        party = self._party(name)
        if expected.purpose is Purpose.UPDATE:
            party = replace(party, policy=self.policy.of_updates)
        header = _header(envelope)
        situation = self._situation(name)
        known = {bytes.fromhex(each.session_id) for each in situation.ledger.uploads}
        step = client.begin(party, envelope, expected, situation, used=known | self._used[name])
        self._used[name].add(header.session_id)
        self._make_room(name)
        live = _Live(session=step.session, header=header, counts=counts, appointment=appointment)
        return await self._take(name, live, step)

    async def _take(self, name: str, live: _Live, step: ClientStep) -> rpc.SecureReply:
        """Keep what follows from a step, then say it."""
        self.ledger.keep(name, step.entries)  # before a word of it leaves
        live.session, replies, masked = step.session, step.replies, b""
        if step.session.masking is not None and live.appointment is None:
            step, masked = self._mask(live, step.session.masking)
            live.session, replies = step.session, step.replies
        key = (name, live.header.session_id)
        if live.session.over:
            self._live.pop(key, None)
        else:
            self._live[key] = live
        self._tell(name, live, step)
        if step.refusal is not None and not replies:
            raise ProtocolError(f"client '{name}' refuses a secure sum: {step.refusal}")
        return _reply(replies, masked)

    def _mask(self, live: _Live, masking: Masking) -> tuple[ClientStep, bytes]:
        """The client's masked counts, and its word for them; a refusal where they are no input."""
        header = live.header
        noise = (
            None
            if header.noise is None
            else noise_share(header.noise, len(live.counts), self.random)
        )
        try:
            words = encode_counts(live.counts, header.lane(COUNTS), noise)
        except BrokenRuleError as error:
            return client.refuse(live.session, error.refusal), b""
        masking.add_masks(COUNTS, words)
        masked = words.tobytes()
        return client.uploaded(live.session, hashlib.sha256(masked).digest()), masked

    def _situation(self, name: str) -> Situation:
        budget = Fraction(repr(self.policy.epsilon_budget)) - self.spent_otherwise(name)
        ledger: Ledger = self.ledger.of(name)
        return Situation(
            now=datetime.now(UTC),
            random=self.random,
            ledger=ledger.model_copy(update={"epsilon_budget": max(0.0, float(budget))}),
        )

    def _party(self, name: str) -> SumParty:
        party = self._parties.get(name)
        if party is None:
            party = self._parties[name] = self.membership.party(name, self.policy)
        return party

    def _make_room(self, name: str) -> None:
        """Forget the keys of sessions that have expired, and of the oldest beyond a few."""
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
                    f"{header.subject}: {name} went into a secure sum over {len(release.clients)} "
                    f"clients on {len(set(release.clients.values()))} hosts, for run {header.run}"
                )


_NO_UPDATE = Refusal(Rule.INPUT, "the update could not be masked")


async def _kept(waiting: asyncio.Future[T]) -> T:
    """Wait for what others wait for as well. Raises RoundClosedError once nobody will set it."""
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if waiting.cancelled():
            raise RoundClosedError("the training that the secure sum is for is over") from None
        raise


def _reply(replies: Sequence[Envelope], masked: bytes = b"") -> rpc.SecureReply:
    envelopes = [wire.SecureEnvelope.FromString(encode(reply)) for reply in replies]
    return rpc.SecureReply(envelopes=envelopes, masked=masked)


def _received(message: wire.SecureEnvelope) -> Envelope:
    return decode(Envelope, message.SerializeToString(deterministic=True))


def _header(envelope: Envelope) -> Header:
    return decode(Header, decode(Invitation, envelope.payload).header)
