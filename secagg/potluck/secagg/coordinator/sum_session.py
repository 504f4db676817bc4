"""One session of a secure sum: the protocol's coordinator, driven over the control stream.

Runs on the event loop. A message to a client is an instruction; a message from a client is the
answer to an instruction. A stage ends when all clients have answered, or when its time is up. A
certificate is on disk before it is sent to clients.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from potluck.common.disclosure import SumKind
from potluck.common.errors import ProtocolError, RunError
from potluck.rpc.v1 import coordinator_pb2
from potluck.rpc.v1 import secure_aggregation_pb2 as wire
from potluck.secagg.protocol import (
    CoordinatorSession,
    CoordinatorStep,
    Envelope,
    FederationRoot,
    MessageType,
    SetCertificate,
    coordinator,
    decode,
    encode,
)
from potluck.server.eligibility.collected_sums import PhaseObserver
from potluck.server.hosts.attendance import Attendance
from potluck.server.profiles.trust import Trust
from potluck.server.store.store_thread import InStore

# The root in force --------------------------------------------------------------------------------


class RootInForce:
    """The root of a federation with its current members, rebuilt when the membership changes."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._root: FederationRoot | None = None

    @property
    def now(self) -> FederationRoot | None:
        """Return the root; None if the federation has none, so that members can't be verified."""
        members = self._trust.members
        if members is None:
            return None
        if self._root is None or self._root.members is not members:
            self._root = FederationRoot(members)
        return self._root

    def require(self) -> FederationRoot:
        """Return the root. Raises RunError if the federation has none."""
        root = self.now
        if root is None:
            raise RunError(
                "the federation has no root; set federation_root and members of the coordinator"
            )
        return root


# The session --------------------------------------------------------------------------------------

COUNTS = "counts"
"""Name of the vector of words that contains the label counts."""

_PRESENCE_SECONDS = 0.5
"""Seconds between two checks of clients that have not answered: they may have disconnected."""

_CERTIFICATES = 8
"""Maximum number of certificates in an invitation; larger than the number of attempts at a sum."""

Event = tuple[str, coordinator_pb2.Answer]


@dataclass(frozen=True, kw_only=True)
class SumTerms:
    """The terms of a sum: its inputs and its protection.

    kind: kind of sum that clients' policies allow or refuse. task: the task in the invitation;
    task_reference: its canonical name. classes: number of counts; 0 if updates are summed.
    least_hosts, colluding_hosts: numbers of distinct hosts (None: up to a third collude). epsilon,
    sensitivity: parameters of the noise that the clients add together; epsilon None means an exact
    sum. model: digest of the model that updates start from.
    """

    run_id: str
    kind: SumKind
    subject: str
    task: coordinator_pb2.Plugin
    task_reference: str
    classes: int
    least_hosts: int
    colluding_hosts: int | None
    stage_seconds: float
    epsilon: float | None = None
    sensitivity: int = 2
    model: str = ""

    @property
    def inputs(self) -> str:
        """A text that is equal for all sums that may have the same inputs.

        A client allows all of these sums over the same set of clients only. Empty if this rule does
        not apply.
        """
        if self.kind is SumKind.STEPWISE or self.epsilon is not None:
            return ""
        return f"updates of {self.model}" if self.kind is SumKind.UPDATE else "label counts"


class SumSession:
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
        """Reasons, by client, of the clients that reported that they can't take part."""
        self._attendance = attendance
        self._in_store = in_store
        self.terms = terms
        self._present = present
        self._observe = observe
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._sent: list[str] = []
        self._certified = False

    async def run(self, step: CoordinatorStep) -> CoordinatorSession:
        """Continue until the session is over."""
        clock = asyncio.get_running_loop().time
        session = step.session
        try:
            await self._carry_out(step)
            begun, expected = clock(), len(session.awaited)
            while not session.over:
                before, deadline = type(session.state), begun + self._patience(session)
                step = await self._next(session, deadline - clock())
                session = step.session
                await self._carry_out(step)
                self._went_on(session)
                if type(session.state) is not before:
                    remain = expected if session.unmasking else len(session.awaited)
                    dropped = max(0, expected - remain)
                    self._observe(before.__name__.lower(), clock() - begun, dropped)
                    begun, expected = clock(), len(session.awaited)
        except asyncio.CancelledError:  # the run is stopped: inform the clients
            self._send(coordinator.abort(session))
            raise
        finally:
            self._attendance.retire(self._sent)
        return session

    async def _next(self, session: CoordinatorSession, left: float) -> CoordinatorStep:
        """Wait for the next answers or a timeout; return the resulting step."""
        if left <= 0 and self._events.empty():
            return await asyncio.to_thread(coordinator.close, session)
        try:
            async with asyncio.timeout(max(0.0, min(left, _PRESENCE_SECONDS))):
                events = [await self._events.get()]
        except TimeoutError:
            absent = [client for client in session.awaited if not self._present(client)]
            return await asyncio.to_thread(without, session, absent)
        while not self._events.empty():  # handle all waiting answers in one thread call
            events.append(self._events.get_nowait())
        return await asyncio.to_thread(self._hear_all, session, events)

    def _hear_all(self, session: CoordinatorSession, events: Sequence[Event]) -> CoordinatorStep:
        step = CoordinatorStep(session=session)
        for client, answer in events:
            step = _after(step, self._hear(step.session, client, answer))
        return step

    def _hear(
        self, session: CoordinatorSession, client: str, answer: coordinator_pb2.Answer
    ) -> CoordinatorStep:
        if answer.WhichOneof("outcome") != "secure":
            failure = answer.failure
            why = f"{failure.message[:300]} ({failure.reason[:80]})"
            self.troubles[client] = (
                why if failure.reason else "the client sent an answer of another kind"
            )
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
            if len(masked) != session.setup.header.upload_bytes:
                self.troubles[client] = (
                    f"the client sent {len(masked)} masked bytes, not "
                    f"{session.setup.header.upload_bytes}"
                )
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
        return _after(before, step)

    def _patience(self, session: CoordinatorSession) -> float:  # noqa: ARG002  # subclasses look
        """Return the maximum duration of the stage, in seconds."""
        return self.terms.stage_seconds

    def _introduce(self, work: coordinator_pb2.SecureStep, client: str) -> None:  # noqa: ARG002  # likewise
        """Add to an invitation the description of what is summed."""
        work.task.CopyFrom(self.terms.task)

    def _went_on(self, session: CoordinatorSession) -> None:
        """Do nothing; called after each step of the session, and overridden by subclasses."""

    async def _carry_out(self, step: CoordinatorStep) -> None:
        session = step.session
        certificate, inputs = session.certificate, self.terms.inputs
        if certificate is not None and inputs and not self._certified:
            kept = certificate.model_dump_json()
            await self._in_store(
                lambda store: store.keep_certificate(inputs, certificate.session_id, kept)
            )
            self._certified = True
        self._send(step)

    def _send(self, step: CoordinatorStep) -> None:
        session = step.session
        session_id = session.session_id.hex()
        left = session.setup.header.expires_at - time.time()
        for client, envelope in step.messages:
            kind = envelope.type
            work = coordinator_pb2.SecureStep(
                session_id=session.session_id,
                envelope=wire.SecureEnvelope.FromString(encode(envelope)),
            )
            if kind is MessageType.INVITATION:
                self._introduce(work, client)
            instruction = coordinator_pb2.Instruction(
                id=f"{self.terms.run_id}/sum/{session_id}/{kind.name.lower()}/{client}",
                client_id=client,
                run_id=self.terms.run_id,
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


def _after(before: CoordinatorStep, step: CoordinatorStep) -> CoordinatorStep:
    """Combine two steps into one, with both steps' messages."""
    return replace(
        step,
        messages=(*before.messages, *step.messages),
    )


def without(session: CoordinatorSession, absent: Sequence[str]) -> CoordinatorStep:
    """Remove clients from a session; return the steps as one. Stops if a stage ends before that."""
    step = CoordinatorStep(session=session)
    for client in absent:
        step = coordinator.lost(step.session, client)
        if step.messages:
            break
    return step


def _received(message: wire.SecureEnvelope) -> Envelope:
    return decode(Envelope, message.SerializeToString(deterministic=True))


async def earlier_certificates(
    in_store: InStore, terms: SumTerms, invited: Collection[str]
) -> list[SetCertificate]:
    """Return certificates of earlier sums with the same inputs, which clients may not know."""
    if not terms.inputs:
        return []
    texts: list[str] = await in_store(
        lambda store: store.certificates(terms.inputs, limit=_CERTIFICATES)
    )
    found = [SetCertificate.model_validate_json(text) for text in texts]
    return [each for each in found if not set(each.clients).isdisjoint(invited)]
