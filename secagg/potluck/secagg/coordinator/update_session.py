"""One session of a secure sum of updates: like `sum_session`, but uploads arrive as files.

Keys and shares are exchanged while clients train. The session holds uploads until the round decides
which of them to sum. It leaves the upload stage only after that decision. So clients never unmask a
sum for a round that is given up. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias

from potluck.common.errors import ProtocolError, RoundClosedError
from potluck.rpc.v1 import coordinator_pb2
from potluck.rpc.v1 import secure_aggregation_pb2 as wire
from potluck.secagg.coordinator.sum_session import SumSession, SumTerms, without
from potluck.secagg.protocol import (
    CoordinatorSession,
    CoordinatorStep,
    Envelope,
    MessageType,
    coordinator,
    decode,
)
from potluck.secagg.protocol.coordinator.coordinator_session import (
    Advertising,
    Uploading,
    expected_clients,
)
from potluck.server.eligibility.collected_sums import PhaseObserver
from potluck.server.hosts.attendance import Attendance
from potluck.server.store.store_thread import InStore

Left: TypeAlias = Callable[[str, str], None]
"""Function that is called with a client that has left the session, and the reason."""


@dataclass(frozen=True, kw_only=True)
class SignedInput:
    """A client's signed confirmation that a file is its input to the sum.

    digest: digest of the file, 32 bytes.
    """

    word: Envelope
    digest: bytes


@dataclass(frozen=True)
class _Certify:
    """Order from the round: sum exactly these uploads; no more uploads will come."""

    uploads: Mapping[str, SignedInput]


@dataclass(frozen=True)
class _Lost:
    """Order from the round: stop waiting for a client."""

    client: str


class MaskedSession(SumSession):
    """One session of secure aggregation, from invitation to end.

    update_ids: id of each client's update. key_seconds: time limit for clients to download the
    model and send their keys.
    """

    def __init__(
        self,
        attendance: Attendance,
        in_store: InStore,
        terms: SumTerms,
        present: Callable[[str], bool],
        observe: PhaseObserver,
        *,
        update_ids: Mapping[str, str],
        key_seconds: float,
        left: Left,
    ) -> None:
        super().__init__(attendance, in_store, terms, present, observe)
        self._update_ids = update_ids
        self._key_seconds = key_seconds
        self._left = left
        self._told: set[str] = set()
        self._control: asyncio.Queue[_Certify | _Lost] = asyncio.Queue()
        self._session: CoordinatorSession | None = None

    # What the round says ----------------------------------------------------------------------

    def check_input(self, client: str, message: wire.SecureEnvelope, digest: bytes) -> SignedInput:
        """Check that a client has signed the file that arrived from it for this session.

        Raises ProtocolError, RoundClosedError if there will be no sum.
        """
        session = self._session
        if session is not None and session.over:
            raise RoundClosedError(
                "this attempt at the round has no secure sum any more; drop the update"
            )
        if session is None or not isinstance(session.state, Uploading):
            raise ProtocolError(
                f"client '{client}' sent its masked update too early: the secure "
                "sum is not at the upload stage"
            )
        word = decode(Envelope, message.SerializeToString(deterministic=True))
        # Only check the message: sessions are immutable, and the new session is discarded.
        step = coordinator.receive(session, client, word, datetime.now(UTC), upload_digest=digest)
        if step.refusal is not None or step.session is session:
            raise ProtocolError(
                f"client '{client}' did not confirm its update with a valid "
                f"signature: {step.refusal}"
            )
        return SignedInput(word=word, digest=digest)

    def lose(self, client: str) -> None:
        """Stop waiting for a client; do nothing if it has left already."""
        self._control.put_nowait(_Lost(client))
        self._events.put_nowait((client, _WAKE))

    def certify(self, uploads: Mapping[str, SignedInput]) -> None:
        """Fix the set of uploads: the session will sum exactly these."""
        self._control.put_nowait(_Certify(dict(uploads)))
        self._events.put_nowait(("", _WAKE))

    # Driving ----------------------------------------------------------------------------------

    async def _next(self, session: CoordinatorSession, left: float) -> CoordinatorStep:
        self._session = session
        uploading = isinstance(session.state, Uploading)
        # While uploading, handle answers before orders: a lost client may have sent a refusal.
        if not self._control.empty() and not (uploading and not self._events.empty()):
            return await asyncio.to_thread(self._obey, session, self._control.get_nowait())
        if not uploading:
            return await super()._next(session, left)
        client, answer = await self._events.get()  # without a timeout: the round has its own
        return await asyncio.to_thread(self._hear, session, client, answer)

    def _obey(self, session: CoordinatorSession, order: _Certify | _Lost) -> CoordinatorStep:
        if isinstance(order, _Lost):
            return without(session, [order.client])
        step = CoordinatorStep(session=session)
        absent = [client for client in session.awaited if client not in order.uploads]
        for client, upload in order.uploads.items():
            at = datetime.now(UTC)
            step = coordinator.receive(
                step.session, client, upload.word, at, upload_digest=upload.digest
            )
            if step.session.over or not isinstance(step.session.state, Uploading):
                return step  # the other clients had left, so this upload ended the stage
        return without(step.session, absent) if absent else coordinator.close(step.session)

    def _hear(
        self, session: CoordinatorSession, client: str, answer: coordinator_pb2.Answer
    ) -> CoordinatorStep:
        if answer is _WAKE:
            return CoordinatorStep(session=session)
        return super()._hear(session, client, answer)

    def _receive(
        self, before: CoordinatorStep, client: str, envelope: Envelope, masked: bytes
    ) -> CoordinatorStep:
        if envelope.type is MessageType.MASKED_INPUT:
            self.troubles[client] = "the client signed an update that it did not upload"
            return coordinator.lost(before.session, client)
        return super()._receive(before, client, envelope, masked)

    def _patience(self, session: CoordinatorSession) -> float:
        fetching = isinstance(session.state, Advertising)
        return self._key_seconds if fetching else super()._patience(session)

    def _introduce(self, work: coordinator_pb2.SecureStep, client: str) -> None:
        work.update_id = self._update_ids[client]

    def _went_on(self, session: CoordinatorSession) -> None:
        self._session = session
        setup, state = session.setup, session.collecting
        for client in setup.invited:
            out = client in setup.gone or (
                state is not None and client not in expected_clients(setup, state)
            )
            if out and client not in self._told:
                self._told.add(client)
                why = self.troubles.get(client)
                refusal = session.refusals.get(client)
                if refusal is not None:
                    why = f"the client refused ({refusal})"
                self._left(
                    client, why or "the client did not take part in the key exchange in time"
                )


_WAKE = coordinator_pb2.Answer()
"""Empty answer: put into the queue of answers, it wakes the reader for an order of the round."""
