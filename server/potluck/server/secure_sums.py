"""Sums over clients' label counts that the coordinator learns, and nothing else about them.

Lives on the event loop: drives `common/secagg`'s coordinator over the control stream. A message to
a client is an instruction, what the client says is its answer; a stage ends when everybody has
answered, or its time is up. A session lives in memory alone: a coordinator that goes down begins
another one, with fresh keys, and an entry of the query log is on disk before clients can act on it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError, ProtocolError, RunError
from potluck.common.secagg import (
    CoordinatorSession,
    CoordinatorStep,
    Envelope,
    FederationRoot,
    Header,
    Lane,
    LaneEncoding,
    LogPosition,
    MessageType,
    Noise,
    Purpose,
    SessionRecord,
    Unmasking,
    complete_thresholds,
    coordinator,
    decode,
    encode,
    session_record,
)
from potluck.common.secagg.fixed_point import COUNT_LIMIT
from potluck.common.secagg.histograms import decode_counts
from potluck.common.secagg.masks import lane_dtype
from potluck.common.secagg.messages import SESSION_ID_BYTES
from potluck.common.secagg.thresholds import (
    COMPLETE_LIMIT,
    assumed_colluding_hosts,
    colluding_clients,
)
from potluck.rpc.v1 import coordinator_pb2
from potluck.rpc.v1 import secure_aggregation_pb2 as wire
from potluck.server.attendance import Attendance
from potluck.server.store import SecureSum, Store

log = structlog.get_logger()

COUNTS = "counts"
"""The lane that label counts are in."""

_PRESENCE_SECONDS = 0.5
"""How often is looked whether clients that have not answered may still come back."""
_SPARE_SECONDS = 60.0
"""Clients keep their keys for this long beyond all stages."""
_STAGES = 5
_PAUSE_SECONDS = 0.2
"""Before the second attempt; twice as long before the third."""

InStore = Callable[[Callable[[Store], Any]], Awaitable[Any]]
Event = tuple[str, coordinator_pb2.Answer]
PhaseObserver = Callable[[str, float, int], None]
"""Told of a phase: its name, its seconds, how many clients dropped out in it."""


@dataclass(frozen=True, kw_only=True)
class SumTerms:
    """What a sum is of, and how it is protected.

    kind: as the clients' policies call it. task: of the invitation; task_reference: its canonical
    name. classes: how many counts. least_hosts, colluding_hosts (a third if None): of distinct
    hosts. epsilon, sensitivity: of noise that the clients make together; exact if None.
    """

    run_id: str
    kind: str
    subject: str
    task: coordinator_pb2.Plugin
    task_reference: str
    classes: int
    least_hosts: int
    colluding_hosts: int | None
    stage_seconds: float
    epsilon: float | None = None
    sensitivity: int = 2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of asking for a sum: the last session's record, and the sum if there is one."""

    record: SessionRecord
    total: NDArray[np.int64] | None = None
    troubles: Mapping[str, str] = field(default_factory=dict)

    def explain(self) -> str:
        """Why there is no sum, in a line."""
        record = self.record
        whys = [f"{who} refuses ({rule})" for who, rule in record.refusals.items()]
        others = self.troubles.keys() - record.refusals.keys()
        whys += [f"{who}: {self.troubles[who]}" for who in sorted(others)]
        whys += [f"{len(record.missing)} did not answer"] * bool(record.missing and not whys)
        return (
            f"aborted at stage {record.stage} by rule {record.rule}, {record.have} of "
            f"{record.need}; {'; '.join(whys[:3]) or 'nobody said why'}"
            + f"; and {len(whys) - 3} more"
            * (len(whys) > 3)
        )


class SecureSums:
    """Asks clients for sums, one after the other. root: None where the federation has none."""

    def __init__(
        self, attendance: Attendance, in_store: InStore, root: FederationRoot | None
    ) -> None:
        self._attendance = attendance
        self._in_store = in_store
        self._root = root
        self._one_at_a_time = asyncio.Lock()
        self.observe: PhaseObserver = lambda *_: None
        """Told of each phase that is over."""

    @property
    def possible(self) -> bool:
        """Whether the federation has a root, without which nobody knows who a member is."""
        return self._root is not None

    async def sum_counts(
        self, terms: SumTerms, clients: Sequence[str], *, present: Callable[[str], bool]
    ) -> Outcome:
        """The sum over those of the clients that stay, tried up to three times with fresh keys.

        Raises RunError where it can't be tried: no root, too few hosts, too many clients.
        """
        async with self._one_at_a_time:
            invited, epochs = self._invited(clients)
            header = self._header(terms, invited)
            while True:
                outcome = await self._attempt(terms, header, invited, epochs, present)
                if outcome.total is not None:
                    return outcome
                log.warning("secure sum failed", run=terms.run_id, why=outcome.explain())
                unwilling = outcome.record.refusals.keys() | outcome.troubles.keys()
                invited, epochs = self._invited([c for c in invited if c not in unwilling])
                try:
                    header = coordinator.retry_header(
                        header, random=os.urandom, issued_at=int(time.time())
                    )
                    _check_invited(invited, header)
                except (ConfigurationError, RunError):
                    return outcome
                await asyncio.sleep(_PAUSE_SECONDS * (header.attempt - 1))

    def _invited(self, clients: Sequence[str]) -> tuple[dict[str, str], dict[str, int]]:
        """Host and data epoch of those that attend."""
        sessions = {client: self._attendance.session_of(client) for client in sorted(clients)}
        attending = {client: session for client, session in sessions.items() if session}
        return (
            {client: session.host_id for client, session in attending.items()},
            {client: session.data_epoch for client, session in attending.items()},
        )

    def _header(self, terms: SumTerms, invited: Mapping[str, str]) -> Header:
        if self._root is None:
            raise RunError(
                "the federation has no root: set federation_root and members of the coordinator"
            )
        hosts = list(invited.values())
        colluding = terms.colluding_hosts
        if colluding is None:
            colluding = assumed_colluding_hosts(len(set(hosts)))
        thresholds = complete_thresholds(hosts, colluding)
        issued_at = int(time.time())
        header = Header(
            federation=self._root.federation,
            session_id=os.urandom(SESSION_ID_BYTES),
            run=terms.run_id,
            purpose=Purpose.HISTOGRAM,
            subject=terms.subject,
            disclosure=terms.kind,
            lanes=(
                Lane(
                    name=COUNTS,
                    length=terms.classes,
                    modulus_bits=64,
                    encoding=LaneEncoding.COUNTS,
                    clip=float(COUNT_LIMIT),
                ),
            ),
            least_hosts=terms.least_hosts,
            colluding_hosts=colluding,
            degree=thresholds.degree,
            threshold=thresholds.threshold,
            quorum=thresholds.quorum,
            issued_at=issued_at,
            expires_at=issued_at + int(_STAGES * terms.stage_seconds + _SPARE_SECONDS),
        )
        _check_invited(invited, header)
        if terms.epsilon is None:
            return header
        honest = thresholds.quorum - colluding_clients(hosts, colluding)
        noise = Noise(
            epsilon=terms.epsilon, sensitivity=terms.sensitivity, contributors=max(1, honest)
        )
        return replace(header, noise=noise)

    async def _attempt(
        self,
        terms: SumTerms,
        header: Header,
        invited: Mapping[str, str],
        epochs: Mapping[str, int],
        present: Callable[[str], bool],
    ) -> Outcome:
        assert self._root is not None  # noqa: S101  # there is no header without
        entries = await self._in_store(lambda store: store.query_log())
        position = LogPosition().extend(entries)
        header = replace(header, log_length=position.length, log_head=position.head)
        step = coordinator.invite(header, invited, self._root, log=entries)
        drive = _Drive(self._attendance, self._in_store, terms, present, self.observe)
        session = await drive.run(step)
        record = session_record(session, datetime.now(UTC))
        unmasking, total = session.unmasking, None
        if unmasking is not None:
            total = await asyncio.to_thread(_total, drive.uploads, unmasking)
        done = SecureSum(
            session_id=record.session_id,
            run_id=terms.run_id,
            kind=terms.kind,
            task=terms.task_reference,
            epochs=epochs,
            record=record.model_dump(mode="json"),
            total=None if total is None else tuple(total.tolist()),
        )
        await self._in_store(lambda store: store.add_sum(done))
        return Outcome(record=record, total=total, troubles=drive.troubles)


class _Drive:
    """One session, from invitation to its end."""

    def __init__(
        self,
        attendance: Attendance,
        in_store: InStore,
        terms: SumTerms,
        present: Callable[[str], bool],
        observe: PhaseObserver,
    ) -> None:
        self.uploads: dict[str, bytes] = {}
        """The masked words of each client."""
        self.troubles: dict[str, str] = {}
        """Why clients can't take part, in their words."""
        self._attendance = attendance
        self._in_store = in_store
        self._terms = terms
        self._present = present
        self._observe = observe
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._sent: list[str] = []

    async def run(self, step: CoordinatorStep) -> CoordinatorSession:
        """Go on until the session is over."""
        clock = asyncio.get_running_loop().time
        session = step.session
        try:
            await self._carry_out(step)
            begun, expected = clock(), len(session.awaited)
            while not session.over:
                before, deadline = type(session.state), begun + self._terms.stage_seconds
                step = await self._next(session, deadline - clock())
                session = step.session
                await self._carry_out(step)
                if type(session.state) is not before:
                    remain = expected if session.unmasking else len(session.awaited)
                    dropped = max(0, expected - remain)
                    self._observe(before.__name__.lower(), clock() - begun, dropped)
                    begun, expected = clock(), len(session.awaited)
        except asyncio.CancelledError:  # the run is stopped, and nobody will ask again
            self._send(coordinator.abort(session))
            raise
        finally:
            self._attendance.retire(self._sent)
        return session

    async def _next(self, session: CoordinatorSession, left: float) -> CoordinatorStep:
        """What follows from the next answer, or from there being none."""
        if left <= 0 and self._events.empty():
            return await asyncio.to_thread(coordinator.close, session)
        try:
            async with asyncio.timeout(max(0.0, min(left, _PRESENCE_SECONDS))):
                client, answer = await self._events.get()
        except TimeoutError:
            absent = [client for client in session.awaited if not self._present(client)]
            return await asyncio.to_thread(_without, session, absent)
        return await asyncio.to_thread(self._hear, session, client, answer)

    def _hear(
        self, session: CoordinatorSession, client: str, answer: coordinator_pb2.Answer
    ) -> CoordinatorStep:
        if answer.WhichOneof("outcome") != "secure":
            failure = answer.failure
            why = f"{failure.message[:300]} ({failure.reason[:80]})"
            self.troubles[client] = why if failure.reason else "it answered otherwise"
            return coordinator.lost(session, client)
        step = CoordinatorStep(session=session)
        for message in answer.secure.envelopes[:2]:
            try:
                envelope = _received(message)
            except ProtocolError as error:
                self.troubles[client] = error.message
                return coordinator.lost(step.session, client)
            step = self._receive(step, client, envelope, answer.secure.masked)
        return step

    def _receive(
        self, before: CoordinatorStep, client: str, envelope: Envelope, masked: bytes
    ) -> CoordinatorStep:
        session, digest = before.session, None
        if envelope.type is MessageType.MASKED_INPUT:
            if len(masked) != session.setting.header.upload_bytes:
                self.troubles[client] = f"it sent {len(masked)} masked bytes"
                return coordinator.lost(session, client)
            digest = hashlib.sha256(masked).digest()
        step = coordinator.receive(
            session, client, envelope, datetime.now(UTC), upload_digest=digest
        )
        if step.refusal is not None:
            self.troubles[client] = str(step.refusal)
            step = coordinator.lost(session, client)
        elif digest is not None:
            self.uploads.setdefault(client, masked)
        return replace(
            step,
            messages=(*before.messages, *step.messages),
            log_entry=step.log_entry or before.log_entry,
        )

    async def _carry_out(self, step: CoordinatorStep) -> None:
        session = step.session
        session_id = session.session_id.hex()
        if step.log_entry is not None:
            entry = step.log_entry
            await self._in_store(lambda store: store.append_query_log(session_id, entry))
        self._send(step)

    def _send(self, step: CoordinatorStep) -> None:
        session = step.session
        session_id = session.session_id.hex()
        left = session.setting.header.expires_at - time.time()
        for client, envelope in step.messages:
            kind = envelope.type
            work = coordinator_pb2.SecureStep(
                session_id=session.session_id,
                envelope=wire.SecureEnvelope.FromString(encode(envelope)),
            )
            if kind is MessageType.INVITATION:
                work.task.CopyFrom(self._terms.task)
            instruction = coordinator_pb2.Instruction(
                id=f"{self._terms.run_id}/sum/{session_id}/{kind.name.lower()}/{client}",
                client_id=client,
                run_id=self._terms.run_id,
                secure=work,
            )
            over = kind is MessageType.ABORT
            self._attendance.instruct(
                instruction,
                deadline=time.monotonic() + max(left, 0.0),
                on_answer=None if over else partial(self._answered, client),
                until_acknowledged=over,
            )
            if not over:
                self._sent.append(instruction.id)

    def _answered(self, client: str, answer: coordinator_pb2.Answer) -> None:
        self._attendance.retire([answer.instruction_id])
        self._events.put_nowait((client, answer))


def _without(session: CoordinatorSession, absent: Sequence[str]) -> CoordinatorStep:
    """The session without some clients: one step, unless a stage ends before all are left out."""
    step = CoordinatorStep(session=session)
    for client in absent:
        step = coordinator.lost(step.session, client)
        if step.messages:
            break
    return step


def _check_invited(invited: Mapping[str, str], header: Header) -> None:
    """Raises RunError for a group that can't have a sum."""
    hosts = len(set(invited.values()))
    needed = max(header.quorum, header.threshold)
    if hosts < header.least_hosts or len(invited) < needed:
        raise RunError(
            f"{len(invited)} clients on {hosts} hosts attend, a secure sum needs {needed} clients "
            f"on {header.least_hosts} hosts",
            clients=len(invited),
            hosts=hosts,
        )
    if len(invited) > COMPLETE_LIMIT:
        raise RunError(
            f"{len(invited)} clients are more than the {COMPLETE_LIMIT} that a secure sum is made "
            "for; sum over cells",
            clients=len(invited),
        )


def _received(message: wire.SecureEnvelope) -> Envelope:
    return decode(Envelope, message.SerializeToString(deterministic=True))


def _total(uploads: Mapping[str, bytes], unmasking: Unmasking) -> NDArray[np.int64]:
    """The sum over the survivors' uploads, unmasked."""
    lane = unmasking.header.lane(COUNTS)
    words: NDArray[Any] = np.zeros(lane.length, lane_dtype(lane.modulus_bits))
    for client in unmasking.survivors:
        words += np.frombuffer(uploads[client], words.dtype)
    unmasking.remove(COUNTS, words)
    return decode_counts(words)
