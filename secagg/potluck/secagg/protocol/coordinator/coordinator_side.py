"""The coordinator's side of a session: a pure state machine.

`invite` begins a session. `receive` takes a client's message, `lost` records that a client will not
answer any more, `close` that a stage's time is over. Each returns a `CoordinatorStep`: the next
session, messages to send, and the refusal of the received message if it broke a rule. A stage ends
when all clients that may still answer have answered, or when it is closed. If enough clients have
answered, the session then continues with them; otherwise it is aborted. An aborted session has no
result; try again with `retry_header`, new keys and the same policy. Clients enforce all rules: the
coordinator follows them so that no client refuses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from potluck.common import plain_text
from potluck.common.errors import ConfigurationError
from potluck.secagg.protocol.coordinator.coordinator_answers import answered, is_late, signed_by
from potluck.secagg.protocol.coordinator.coordinator_session import (
    Aborted,
    Advertising,
    Collecting,
    CoordinatorSession,
    CoordinatorStep,
    SessionSetup,
    SetCertificate,
    Shortage,
    Uploading,
    expected_clients,
)
from potluck.secagg.protocol.coordinator.coordinator_stages import (
    abort_session,
    advance,
    farewell,
    unsigned,
)
from potluck.secagg.protocol.primitives.sharing import Random
from potluck.secagg.protocol.rules import BrokenRuleError, Refusal, Rule, require
from potluck.secagg.protocol.wire.evidence import check_evidence, verdict_bytes
from potluck.secagg.protocol.wire.message_encoding import decode, encode
from potluck.secagg.protocol.wire.messages import (
    SESSION_ID_BYTES,
    Abort,
    Dispute,
    Envelope,
    Evidence,
    Header,
    Invitation,
    MessageType,
    RefusalMessage,
)
from potluck.secagg.protocol.wire.transcript import (
    FederationRoot,
    verify,
)

MOST_ATTEMPTS: Final = 3
"""Maximum number of attempts at one sum: the first and two retries."""


def invite(
    header: Header,
    invited: Mapping[str, str],
    root: FederationRoot,
    *,
    certified: Sequence[SetCertificate] = (),
) -> CoordinatorStep:
    """Begin a session. invited: the host of each client. certified: certificates of earlier
    sessions that may have had the same inputs, for clients that don't know the outcome of those
    sessions.

    Raises ConfigurationError if the cohort is too small for the sizes in the header.
    """
    hosts = len(set(invited.values()))
    needed = max(header.quorum, header.threshold)
    if hosts < header.least_hosts or len(invited) < needed:
        raise ConfigurationError(
            f"{len(invited)} clients on {hosts} hosts are too few for the sum, which needs "
            f"{needed} clients on {header.least_hosts} hosts",
            clients=len(invited),
            hosts=hosts,
        )
    serialised = encode(header)
    setup = SessionSetup(
        header=header,
        header_sha256=hashlib.sha256(serialised).digest(),
        invited=dict(sorted(invited.items())),
        root=root,
    )
    shown = tuple(each.shown() for each in certified)
    message = unsigned(MessageType.INVITATION, Invitation(serialised, shown))
    return CoordinatorStep(
        session=CoordinatorSession(setup=setup, state=Advertising()),
        messages=tuple((client, message) for client in setup.invited),
    )


def receive(
    session: CoordinatorSession,
    client: str,
    envelope: Envelope,
    now: datetime,
    *,
    upload_digest: bytes | None = None,
) -> CoordinatorStep:
    """Handle a message. client: its sender, as authenticated by the transport.

    upload_digest: with a `MaskedInput`, the digest of the complete vector that has arrived. Never
    raises, whatever the message contains.
    """
    state = session.collecting
    digest = hashlib.sha256(client.encode() + b"\0" + encode(envelope)).digest()
    if state is None or digest in session.heard:
        return CoordinatorStep(session=session)
    try:
        require(
            client in session.setup.invited,
            Rule.MEMBER,
            f"client {client!r} is not invited to the session",
        )
        require(
            client not in session.setup.gone, Rule.STAGE, f"client {client!r} has left the session"
        )
        if envelope.type is MessageType.REFUSAL:
            return _refused(session, state, client, envelope)
        if envelope.type is MessageType.EVIDENCE and isinstance(state, Uploading):
            return _take_evidence(session, state, client, envelope)
        if is_late(envelope.type, state):
            return CoordinatorStep(session=session)
        expected = expected_clients(session.setup, state)
        require(
            client in expected,
            Rule.STAGE,
            f"client {client!r} sent a message that the session does not expect from this client",
        )
        require(
            client not in state.answers,
            Rule.DUPLICATE,
            f"client {client!r} has already answered at this stage",
        )
        after = answered(session.setup, state, client, envelope, now, upload_digest)
    except BrokenRuleError as error:
        return CoordinatorStep(session=session, refusal=error.refusal)
    heard = session.heard | {digest}
    return advance(replace(session, state=after, heard=heard), closing=False)


def lost(session: CoordinatorSession, client: str) -> CoordinatorStep:
    """Stop waiting for a client that will not answer any more."""
    if session.over or client not in session.setup.invited:
        return CoordinatorStep(session=session)
    return advance(_without(session, client, None), closing=False)


def close(session: CoordinatorSession) -> CoordinatorStep:
    """End the current stage, because its time is up."""
    if session.over:
        return CoordinatorStep(session=session)
    return advance(session, closing=True)


def abort(session: CoordinatorSession, rule: Rule = Rule.STAGE) -> CoordinatorStep:
    """End the session for a reason of the coordinator's own, e.g. a run that is stopped."""
    state = session.collecting
    if state is None:
        return CoordinatorStep(session=session)
    return abort_session(session, state, Shortage(rule, 0, 0))


def retry_header(header: Header, *, random: Random, issued_at: int) -> Header:
    """Return the header of the next attempt: a new session id and time, the same policy.

    Raises ConfigurationError after the last attempt.
    """
    if header.attempt >= MOST_ATTEMPTS:
        raise ConfigurationError(
            f"the sum failed in {header.attempt} attempts; see the coordinator's log for the "
            "clients that left, and the reasons",
            attempts=header.attempt,
        )
    lasts = header.expires_at - header.issued_at
    return replace(
        header,
        session_id=random(SESSION_ID_BYTES),
        attempt=header.attempt + 1,
        issued_at=issued_at,
        expires_at=issued_at + lasts,
    )


def _refused(
    session: CoordinatorSession, state: Collecting, client: str, envelope: Envelope
) -> CoordinatorStep:
    message = decode(RefusalMessage, envelope.payload)
    require(
        message.session_id == session.session_id,
        Rule.SESSION,
        "the refusal belongs to another session",
    )
    require(
        message.client == client,
        Rule.MEMBER,
        f"client {client!r} sent a refusal in the name of client {message.client!r}",
    )
    if not isinstance(state, Advertising):  # before that stage, the client's key is unknown
        require(
            client in state.roster.participants,
            Rule.STAGE,
            f"client {client!r} refused, but is not in the session's roster",
        )
        verify(state.roster.participants[client].key, envelope, client)
    try:
        refusal = Refusal(Rule(message.rule), plain_text.plain(message.detail, 500))
    except ValueError:
        raise BrokenRuleError(Rule.MALFORMED, "the refusal does not name a known rule") from None
    if message.accused and isinstance(state, Uploading):
        return _take_accusation(session, state, client, message.accused)
    return advance(_without(session, client, refusal), closing=False)


def _without(session: CoordinatorSession, client: str, why: Refusal | None) -> CoordinatorSession:
    gone = {**session.setup.gone, client: session.setup.gone.get(client) or why}
    return replace(session, setup=replace(session.setup, gone=gone))


# Disputes -----------------------------------------------------------------------------------------
# If a client reports that it can't decrypt another client's share, the coordinator trusts neither
# side. The accuser receives the message that the accused has signed, and must prove that the share
# in it can't be decrypted. With a valid proof the session ends, so that the next one can exclude
# the accused. Otherwise only the accuser is excluded.


def _take_accusation(
    session: CoordinatorSession, state: Uploading, accuser: str, accused: str
) -> CoordinatorStep:
    """Send the accuser the message that the accused has signed.

    Raises BrokenRuleError if the accuser can't have received a share from the accused, or has left
    the session.
    """
    require(
        accuser in state.sharers,
        Rule.STAGE,
        f"client {accuser!r} accused a client, but has sent no shares in this session",
    )
    require(
        accuser not in state.answers,
        Rule.STAGE,
        f"client {accuser!r} accused a client after its own upload",
    )
    partners = state.roster.neighbours[accuser].intersection(state.sharers)
    require(
        accused in partners,
        Rule.SET,
        f"client {accuser!r} accused client {accused!r}, from which it received no share",
    )
    before = state.disputes.get(accuser)
    if before == accused:
        return CoordinatorStep(session=session)
    require(
        before is None, Rule.DUPLICATE, f"client {accuser!r} has already accused another client"
    )
    after = replace(state, disputes={**state.disputes, accuser: accused})
    message = unsigned(MessageType.DISPUTE, Dispute(session.session_id, state.shares[accused]))
    return CoordinatorStep(session=replace(session, state=after), messages=((accuser, message),))


def _take_evidence(
    session: CoordinatorSession, state: Uploading, accuser: str, envelope: Envelope
) -> CoordinatorStep:
    """End the session if the accused is proven to be at fault. Raises BrokenRuleError otherwise."""
    accused = state.disputes.get(accuser)
    require(
        accused is not None,
        Rule.STAGE,
        f"client {accuser!r} sent evidence, but has accused no client",
    )
    message = signed_by(state.roster, accuser, envelope, Evidence)
    require(
        message.accused == accused,
        Rule.EVIDENCE,
        "the evidence is against another client than the accused",
    )
    shares = state.shares[message.accused]
    conviction = check_evidence(state.roster, message, shares)
    abort = Abort(session.session_id, state.stage, 0, 0, (), Rule.SHARE)
    ended = Aborted(
        abort=abort,
        conviction=conviction,
        verdict=verdict_bytes(state.roster, shares, envelope),
    )
    return farewell(session, ended)
