"""The rule that an input without noise is summed over at most one set of clients.

A second sum over the same set is allowed, with the same vector. So two sets have either the same
honest clients or no honest client in common, and no combination of sums describes fewer clients
than a single sum.

A client that uploaded but was not asked for shares does not know if its upload is in a sum. It must
find out before it uploads the same input again, in one of two ways. *Renunciation*: each advert
lists the sessions, over possibly the same input, in which its client has given shares. From then on
the client gives no shares in any unlisted earlier session. Once a quorum of an earlier session's
clients has renounced it in this way, the remaining clients and the colluders are fewer than its
threshold, so it can't end in a sum. *Certificate*: a quorum's consents name the set that was
summed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import datetime

from potluck.secagg.protocol.policy.ledger import (
    Ledger,
    SessionView,
    Settled,
    Upload,
    vector_sha256,
)
from potluck.secagg.protocol.policy.sum_policy import ClientPolicy
from potluck.secagg.protocol.rules import BrokenRuleError, Rule, require
from potluck.secagg.protocol.wire.message_encoding import check_names, encode
from potluck.secagg.protocol.wire.messages import (
    CertifiedSet,
    Consent,
    Envelope,
    Header,
    MessageType,
    Purpose,
)
from potluck.secagg.protocol.wire.transcript import FederationRoot, Roster, survivors_digest


def keeps_to_one_set(header: Header, policy: ClientPolicy) -> bool:
    """Return True if this rule applies to a session, so that adverts list earlier sessions.

    False with noise, since each noisy sum costs budget. Also False if the kind of sum does not
    protect single clients.
    """
    return header.noise is None and header.disclosure not in policy.unprotected


def revealed_sessions(ledger: Ledger, header: Header, policy: ClientPolicy) -> tuple[bytes, ...]:
    """Return the sessions that an advert must list: the client has given shares in them.

    For updates: sessions over the same model. For label counts: sessions over any data epoch, since
    other clients don't know this client's epochs.
    """
    model = header.model_digest.hex()
    return tuple(
        sorted(
            bytes.fromhex(each.session_id)
            for each in ledger.releases
            if each.purpose is header.purpose
            and each.model_digest == model
            and each.epsilon is None
            and each.disclosure not in policy.unprotected
        )
    )


def superseded(
    header: Header, others: Iterable[Header], policy: ClientPolicy, now: datetime
) -> tuple[bytes, ...]:
    """Return the sessions to forget before the client answers a new invitation: its advert
    renounces them.

    others: headers of this client's sessions in progress. Raises BrokenRuleError (released) if one
    of these sessions belongs to another run.
    """
    found = []
    for other in others:
        alike = other.purpose is header.purpose and other.model_digest == header.model_digest
        if not alike or not keeps_to_one_set(other, policy):
            continue
        # A coordinator runs only one sum of counts at a time, for all its runs together.
        ends = other.run == header.run or header.purpose is Purpose.HISTOGRAM
        require(
            ends or other.expires_at <= now.timestamp(),
            Rule.RELEASED,
            f"a sum of this input is in progress for run {other.run[:40]!r}; wait until that sum "
            "ends",
        )
        found.append(other.session_id)
    return tuple(found)


def settle(
    ledger: Ledger,
    input_id: str,
    roster: Roster,
    certified: Sequence[CertifiedSet],
    *,
    client: str,
    root: FederationRoot,
    at: datetime,
) -> tuple[Settled, ...]:
    """Return entries for earlier sessions that a new roster and the certificates settle.

    Raises BrokenRuleError (certificate, malformed) for an invalid certificate.
    """
    shown = {each.session_id.hex(): each for each in certified}
    found = []
    for upload in ledger.open_uploads(input_id):
        view, session_id = upload.view, upload.session_id
        if view is None:
            continue
        if session_id in shown and _certifies(shown[session_id], view, roster, root):
            clients = shown[session_id].clients
            known = clients if client in clients else ()
            found.append(Settled(session_id=session_id, clients=known, at=at))
        elif len(_renouncing(upload, view, roster)) >= view.renouncers_needed:
            found.append(Settled(session_id=session_id, clients=(), at=at))
    return tuple(found)


def _renouncing(upload: Upload, view: SessionView, roster: Roster) -> list[str]:
    session_id = bytes.fromhex(upload.session_id)
    return [
        name
        for name in view.clients
        if name in roster.participants
        and session_id not in roster.participants[name].advert.revealed
    ]


def _certifies(
    shown: CertifiedSet, view: SessionView, roster: Roster, root: FederationRoot
) -> bool:
    """Return True if a quorum signed this set.

    Signers that are not in the roster, or whose member key has changed since, don't count.
    """
    check_names(shown.clients, "the clients of a certified set")
    check_names([each.client for each in shown.endorsements], "the endorsements of a certified set")
    sharers = bytes.fromhex(view.sharers_sha256)
    consent = Consent(
        bytes.fromhex(view.roster_sha256), sharers, survivors_digest(sharers, shown.clients)
    )
    payload, valid = encode(consent), 0
    for each in shown.endorsements:
        require(
            each.client in shown.clients and each.client in view.clients,
            Rule.CERTIFICATE,
            "a consent is from a client outside the certified set",
        )
        if each.client in roster.participants:
            envelope = Envelope(MessageType.CONSENT, payload, each.signature)
            with suppress(BrokenRuleError):
                root.verify(roster.participants[each.client].record, envelope)
                valid += 1
    return valid >= view.quorum


def check_group(
    ledger: Ledger, header: Header, input_id: str, clients: Collection[str], colluding: int
) -> None:
    """Raise BrokenRuleError (released) unless an input may be uploaded for a sum within a group.

    clients: the clients of the group. colluding: maximum number of clients in the group that
    collude. If the input is in a sum already, only the set of that sum may find a quorum in the
    group.
    """
    _check_settled(ledger, header, input_id)
    _check_vector(ledger, header, input_id)
    for earlier in ledger.sets_of(input_id):
        others = len(set(clients) - earlier)
        if not earlier <= set(clients) or others + colluding >= header.quorum:
            raise BrokenRuleError(Rule.RELEASED, _known(header, earlier))


def check_set(ledger: Ledger, header: Header, input_id: str, clients: Collection[str]) -> None:
    """Raise BrokenRuleError (released) unless the sum over this very set may be unmasked."""
    _check_settled(ledger, header, input_id)
    _check_vector(ledger, header, input_id)
    for earlier in ledger.sets_of(input_id):
        if earlier != frozenset(clients):
            raise BrokenRuleError(Rule.RELEASED, _known(header, earlier))


def _check_settled(ledger: Ledger, header: Header, input_id: str) -> None:
    for upload in ledger.open_uploads(input_id):
        if upload.session_id != header.session_id.hex():
            raise BrokenRuleError(Rule.RELEASED, _unsettled(upload))


def _check_vector(ledger: Ledger, header: Header, input_id: str) -> None:
    """Raise BrokenRuleError (released) if the input is in a sum already, encoded as another vector.

    Two sums over the same clients that differ in a setting can disclose a single sample.
    """
    vector = vector_sha256(header).hex()
    for upload in ledger.summed(input_id):
        if upload.vector != vector:
            raise BrokenRuleError(
                Rule.RELEASED,
                "this input is in a sum with other settings of training or masking, for run "
                f"{upload.run[:40]!r}; use the same settings, or start from another model with "
                "another seed",
            )


def _known(header: Header, earlier: Collection[str]) -> str:
    other = ", or start from another model" * (header.purpose is Purpose.UPDATE)
    return (
        f"this input is in a sum over another set of {len(earlier)} clients, and the difference "
        f"of both sums would disclose single inputs; sum over exactly these clients{other}"
    )


def _unsettled(upload: Upload) -> str:
    if upload.view is None:
        return "this input is in sums that do not protect the input"
    needed, clients = upload.view.renouncers_needed, len(upload.view.clients)
    return (
        f"an earlier sum of this input, for run {upload.run[:40]!r}, may be complete: fewer than "
        f"{needed} of the sum's {clients} clients confirmed that they gave no shares; select more "
        "of these clients, or exactly the clients in that sum"
    )


def session_view(roster: Roster, sharers_sha256: bytes) -> SessionView:
    """Return the facts with which the client can settle this session later."""
    header, clients = roster.header, tuple(roster.participants)
    complete = not 0 < header.degree < len(clients) - 1
    return SessionView(
        clients=clients,
        quorum=header.quorum,
        # On a ring, a few clients hold all shares of a secret, so all clients must renounce.
        renouncers_needed=header.quorum if complete else len(clients),
        roster_sha256=roster.digest.hex(),
        sharers_sha256=sharers_sha256.hex(),
    )


def in_known_set(
    ledger: Ledger, header: Header, input_id: str, at: datetime
) -> tuple[Settled, ...]:
    """Return entries for a new upload of an input that is already in a sum.

    It can only be summed over the same set again.
    """
    return tuple(
        Settled(session_id=header.session_id.hex(), clients=tuple(sorted(each)), at=at)
        for each in ledger.sets_of(input_id)
    )
