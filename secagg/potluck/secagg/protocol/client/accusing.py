"""A client's answers if it can't decrypt another client's share: it accuses, then gives evidence.

The accuser has not uploaded its vector, and never will in this session. Evidence exists only if it
proves that the accused broke the protocol. It discloses only what the accused already knows. See
docs/security/specification.md.
"""

from __future__ import annotations

from potluck.secagg.protocol.client.client_session import (
    Accusing,
    Answer,
    Ended,
    Shared,
    Situation,
)
from potluck.secagg.protocol.rules import Refusal
from potluck.secagg.protocol.wire.evidence import gather_evidence
from potluck.secagg.protocol.wire.message_encoding import encode
from potluck.secagg.protocol.wire.messages import Dispute, MessageType, RefusalMessage
from potluck.secagg.protocol.wire.transcript import sign


def accuse(state: Shared, session_id: bytes, accused: str, refusal: Refusal) -> Answer:
    """Refuse to continue, and name the client whose share can't be decrypted."""
    agreed = state.agreed
    message = RefusalMessage(session_id, agreed.client, refusal.rule, refusal.detail[:500], accused)
    reply = sign(agreed.party.key, MessageType.REFUSAL, encode(message))
    after = Accusing(
        agreed=agreed,
        roster=state.roster,
        accused=accused,
        channel_key=state.keys.channel_key,
        refusal=refusal,
    )
    return Answer(after, (reply,), refusal=refusal)


def give_evidence(state: Accusing, message: Dispute, situation: Situation) -> Answer:
    """Prove that the share that the accused signed can't be decrypted.

    The proof discloses nothing more.
    """
    agreed = state.agreed
    evidence = gather_evidence(
        state.roster,
        state.accused,
        agreed.client,
        state.channel_key,
        message.shares,
        situation.random,
    )
    reply = sign(agreed.party.key, MessageType.EVIDENCE, encode(evidence))
    return Answer(Ended(refusal=state.refusal), (reply,))
