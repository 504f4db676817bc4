"""The step from one stage to the next, its messages, and the end of a session that fails.

A stage can end with the clients that answered only if clients would accept that set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from potluck.secagg.protocol.coordinator.coordinator_session import (
    Aborted,
    Advertising,
    Collecting,
    Consenting,
    CoordinatorSession,
    CoordinatorStep,
    Finished,
    Revealing,
    SetCertificate,
    Sharing,
    Shortage,
    Uploading,
    expected_clients,
)
from potluck.secagg.protocol.coordinator.unmasking import (
    ReconstructionError,
    fewest_shares,
    unmask,
)
from potluck.secagg.protocol.rules import Rule
from potluck.secagg.protocol.wire.message_encoding import decode, encode
from potluck.secagg.protocol.wire.messages import (
    Abort,
    Certificate,
    Delivery,
    Endorsement,
    Envelope,
    Header,
    MessageType,
    RosterMessage,
    SealedShare,
    Shares,
    Survivors,
)
from potluck.secagg.protocol.wire.transcript import (
    Roster,
    build_roster,
    sharers_digest,
    survivors_digest,
)


def advance(session: CoordinatorSession, *, closing: bool) -> CoordinatorStep:
    """Go to the next stage if this one is complete, or if `closing` is True."""
    state = session.collecting
    ended = closing or not session.awaited
    match state:
        case None:
            return CoordinatorStep(session=session)
        case Consenting():
            if not ended and len(state.answers) < session.setup.header.quorum:
                return CoordinatorStep(session=session)
            return _leave_consenting(session, state)
        case Revealing():
            return _try_unmasking(session, state, ended=ended)
        case _ if not ended:
            return CoordinatorStep(session=session)
        case Advertising():
            return _leave_advertising(session, state)
        case Sharing():
            return _leave_sharing(session, state)
        case Uploading():
            return _leave_uploading(session, state)


def _leave_advertising(session: CoordinatorSession, state: Advertising) -> CoordinatorStep:
    setup = session.setup
    shortage = _too_few(setup.header, [setup.invited[client] for client in state.answers])
    if shortage is not None:
        return abort_session(session, state, shortage)
    adverts = [state.answers[client] for client in sorted(state.answers)]
    roster = build_roster(setup.header, setup.header_sha256, adverts)
    envelopes = tuple(each.envelope for each in adverts)
    message = unsigned(MessageType.ROSTER, RosterMessage(session.session_id, envelopes))
    messages = [(client, message) for client in roster.participants]
    return _next(session, Sharing(roster=roster), messages, state)


def _leave_sharing(session: CoordinatorSession, state: Sharing) -> CoordinatorStep:
    roster, sharers = state.roster, tuple(sorted(state.answers))
    shortage = _unusable(session, roster, sharers)
    if shortage is not None:
        return abort_session(session, state, shortage)
    delivered: dict[str, list[SealedShare]] = {client: [] for client in sharers}
    for sender in sharers:
        for each in decode(Shares, state.answers[sender].payload).shares:
            if each.client in delivered:
                delivered[each.client].append(SealedShare(sender, each.ciphertext))
    messages = [
        (
            client,
            unsigned(MessageType.DELIVERY, Delivery(session.session_id, sharers, tuple(shares))),
        )
        for client, shares in delivered.items()
    ]
    digest = sharers_digest(roster.digest, sharers)
    after = Uploading(roster=roster, sharers=sharers, sharers_sha256=digest, shares=state.answers)
    return _next(session, after, messages, state)


def _leave_uploading(session: CoordinatorSession, state: Uploading) -> CoordinatorStep:
    survivors = tuple(sorted(state.answers))
    shortage = _unusable(session, state.roster, survivors)
    if shortage is not None:
        return abort_session(session, state, shortage)
    after = Consenting(
        roster=state.roster,
        sharers=state.sharers,
        sharers_sha256=state.sharers_sha256,
        survivors=survivors,
        survivors_sha256=survivors_digest(state.sharers_sha256, survivors),
    )
    message = unsigned(MessageType.SURVIVORS, Survivors(session.session_id, survivors))
    return _next(session, after, [(client, message) for client in survivors], state)


def _leave_consenting(session: CoordinatorSession, state: Consenting) -> CoordinatorStep:
    header = session.setup.header
    consents = len(state.answers)
    if consents < header.quorum:
        return abort_session(session, state, Shortage(Rule.CERTIFICATE, consents, header.quorum))
    endorsements = [Endorsement(client, state.answers[client]) for client in sorted(state.answers)]
    certificate = Certificate(session.session_id, tuple(endorsements[: header.quorum]))
    message = unsigned(MessageType.CERTIFICATE, certificate)
    after = Revealing(
        roster=state.roster,
        sharers=state.sharers,
        sharers_sha256=state.sharers_sha256,
        survivors=state.survivors,
        survivors_sha256=state.survivors_sha256,
    )
    kept = SetCertificate(
        session_id=header.session_id.hex(),
        clients=state.survivors,
        roster_sha256=state.roster.digest.hex(),
        sharers_sha256=state.sharers_sha256.hex(),
        signatures={each.client: each.signature.hex() for each in certificate.endorsements},
    )
    messages = [(client, message) for client in state.survivors]
    return _next(replace(session, certificate=kept), after, messages)


def _try_unmasking(
    session: CoordinatorSession, state: Revealing, *, ended: bool
) -> CoordinatorStep:
    threshold = session.setup.header.threshold
    if not ended and len(state.answers) < threshold:  # too few shares for any secret: wait
        return CoordinatorStep(session=session)
    fewest = fewest_shares(state.sharers, state.answers)
    if fewest < threshold:
        if not ended:
            return CoordinatorStep(session=session)
        return abort_session(session, state, Shortage(Rule.TOO_FEW, fewest, threshold))
    try:
        unmasking = unmask(
            state.roster, state.sharers_sha256, state.sharers, state.survivors, state.answers
        )
    except ReconstructionError as error:
        if not ended:  # wait: more shares may help
            return CoordinatorStep(session=session)
        shortage = Shortage(Rule.RECONSTRUCTION, fewest, threshold, error.suspects)
        return abort_session(session, state, shortage)
    return CoordinatorStep(session=replace(session, state=Finished(unmasking=unmasking)))


def _too_few(header: Header, hosts: Sequence[str]) -> Shortage | None:
    distinct = len(set(hosts))
    if distinct < header.least_hosts:
        return Shortage(Rule.TOO_FEW, distinct, header.least_hosts)
    needed = max(header.quorum, header.threshold)
    if len(hosts) < needed:
        return Shortage(Rule.TOO_FEW, len(hosts), needed)
    return None


def _unusable(
    session: CoordinatorSession, roster: Roster, clients: Sequence[str]
) -> Shortage | None:
    """Return the rule by which clients would refuse to continue with this set; None if no rule
    forbids it.
    """
    header = session.setup.header
    shortage = _too_few(header, [session.setup.invited[client] for client in clients])
    if shortage is not None:
        return shortage
    holding = [len(roster.neighbours[c].intersection(clients)) + 1 for c in clients]
    if min(holding) < header.threshold:
        return Shortage(Rule.TOO_FEW, min(holding), header.threshold)
    return None


def _next(
    session: CoordinatorSession,
    state: Collecting,
    messages: list[tuple[str, Envelope]],
    before: Advertising | Sharing | Uploading | None = None,
) -> CoordinatorStep:
    """Enter a stage.

    Notify clients that missed the previous stage, so that they forget the session.
    """
    if before is not None:
        behind = [c for c in expected_clients(session.setup, before) if c not in before.answers]
        notice = Abort(session.session_id, before.stage, 0, 0, (), Rule.STAGE)
        left_out = unsigned(MessageType.ABORT, notice)
        messages = [*messages, *((client, left_out) for client in behind)]
    return CoordinatorStep(session=replace(session, state=state), messages=tuple(messages))


def abort_session(
    session: CoordinatorSession, state: Collecting, shortage: Shortage
) -> CoordinatorStep:
    """Abort the session and notify all clients that may still be connected."""
    expected = expected_clients(session.setup, state)
    missing = tuple(sorted(client for client in expected if client not in state.answers))
    message = Abort(
        session.session_id, state.stage, shortage.have, shortage.need, missing, shortage.rule
    )
    return farewell(session, Aborted(abort=message, suspects=shortage.suspects))


def farewell(session: CoordinatorSession, ended: Aborted) -> CoordinatorStep:
    """Notify all clients that may still be connected that the session has no sum."""
    envelope = unsigned(MessageType.ABORT, ended.abort)
    told = [client for client in session.setup.invited if client not in session.setup.gone]
    return CoordinatorStep(
        session=replace(session, state=ended),
        messages=tuple((client, envelope) for client in told),
    )


def unsigned(kind: MessageType, message: object) -> Envelope:
    """Return a message in an unsigned envelope: the coordinator has no key that clients know."""
    return Envelope(kind, encode(message))
