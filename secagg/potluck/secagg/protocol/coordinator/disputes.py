"""The coordinator's part if a client reports that it can't decrypt another client's share.

The coordinator trusts neither side. The accuser receives the message that the accused has signed,
and must prove that the share in it can't be decrypted. With a valid proof the session ends, so that
the next one can exclude the accused. Otherwise only the accuser is excluded.
"""

from __future__ import annotations

from dataclasses import replace

from potluck.secagg.protocol.coordinator.coordinator_answers import signed_by
from potluck.secagg.protocol.coordinator.coordinator_session import (
    Aborted,
    CoordinatorSession,
    CoordinatorStep,
    Uploading,
)
from potluck.secagg.protocol.coordinator.coordinator_stages import farewell, unsigned
from potluck.secagg.protocol.rules import Rule, require
from potluck.secagg.protocol.wire.evidence import check_evidence, verdict_bytes
from potluck.secagg.protocol.wire.messages import (
    Abort,
    Dispute,
    Envelope,
    Evidence,
    MessageType,
)


def take_accusation(
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


def take_evidence(
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
