"""The coordinator's record of a session that is over: members, sum, policy, refusals.

It is for audits. A client's own record is its ledger. Neither record holds an input, a key or a
masked vector.
"""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from potluck.secagg.protocol.coordinator.coordinator_session import (
    Aborted,
    CoordinatorSession,
    Finished,
    SetCertificate,
)
from potluck.secagg.protocol.wire.messages import Purpose


class SessionRecord(BaseModel):
    """The coordinator's record of one session's end.

    clients: host by client, of the clients in the sum; without a sum, of the invited clients.
    refusals: the broken rule that a client named, by client. have, need: actual and required number
    of what `rule` counts, if the session was aborted. suspects: clients that may have sent wrong
    shares; without a sum, the owner of a secret that its shares don't give, then their holders.
    convicted: client that is proven to have sent a share that can't be decrypted, with the client
    that proved it. verdict: the proof, which `check_verdict` reads, in base64. certificate:
    certificate of the set that a quorum consented to. epsilon: ε of the sum; None for an exact one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    session_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    run: str
    round: int
    attempt: int
    purpose: Purpose
    subject: str
    disclosure: str
    outcome: Literal["released", "aborted"]
    clients: dict[str, str]
    least_hosts: int
    colluding_hosts: int
    threshold: int
    quorum: int
    epsilon: float | None
    refusals: dict[str, str] = {}
    suspects: tuple[str, ...] = ()
    convicted: dict[str, str] = {}
    verdict: str = ""
    certificate: SetCertificate | None = None
    stage: str = ""
    rule: str = ""
    have: int = 0
    need: int = 0
    missing: tuple[str, ...] = ()
    at: AwareDatetime

    @property
    def hosts(self) -> int:
        """Number of distinct hosts of the clients."""
        return len(set(self.clients.values()))


def session_record(session: CoordinatorSession, at: AwareDatetime) -> SessionRecord:
    """Return the record of a session that is over. Raises ValueError for one that is not."""
    state, setup = session.state, session.setup
    header = setup.header
    values: dict[str, object] = {
        "session_id": header.session_id.hex(),
        "run": header.run,
        "round": header.round,
        "attempt": header.attempt,
        "purpose": header.purpose,
        "subject": header.subject,
        "disclosure": header.disclosure,
        "least_hosts": header.least_hosts,
        "colluding_hosts": header.colluding_hosts,
        "threshold": header.threshold,
        "quorum": header.quorum,
        "epsilon": header.noise.epsilon if header.noise else None,
        "refusals": {client: str(why.rule) for client, why in session.refusals.items()},
        "certificate": session.certificate,
        "at": at,
    }
    if isinstance(state, Finished):
        clients = {client: setup.invited[client] for client in state.unmasking.survivors}
        values |= {"outcome": "released", "clients": clients, "suspects": state.unmasking.suspects}
    elif isinstance(state, Aborted):
        told = state.abort
        values |= {
            "outcome": "aborted",
            "clients": dict(setup.invited),
            "suspects": state.suspects,
            "convicted": {each.accused: each.accuser for each in [state.conviction] if each},
            "verdict": base64.b64encode(state.verdict).decode(),
            "stage": told.stage,
            "rule": told.rule,
            "have": told.have,
            "need": told.need,
            "missing": told.missing,
        }
    else:
        raise ValueError("a session record needs a session that has ended")
    return SessionRecord.model_validate(values)
