"""A client's answers, stage by stage: each checks a message, then replies to it.

All checks raise BrokenRuleError, which `client_side` turns into a refusal that ends the session.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from potluck.secagg.protocol.client.accusing import accuse
from potluck.secagg.protocol.client.client_session import (
    Advertised,
    Agreed,
    Answer,
    Consented,
    Masking,
    Revealed,
    Shared,
    Situation,
    Uploaded,
    View,
)
from potluck.secagg.protocol.policy.ledger import (
    Ledger,
    LedgerEntry,
    check_charge,
    release_entry,
    upload_entry,
)
from potluck.secagg.protocol.policy.one_set import (
    check_group,
    check_set,
    in_known_set,
    keeps_to_one_set,
    revealed_sessions,
    session_view,
    settle,
)
from potluck.secagg.protocol.policy.pins import check_pins
from potluck.secagg.protocol.policy.sum_policy import check_roster
from potluck.secagg.protocol.primitives import sharing
from potluck.secagg.protocol.primitives.agreement import (
    KEY_BYTES,
    SessionKeys,
    SharePair,
    agree,
    commitment,
    open_pair,
    pair_seed,
    seal_pair,
    self_seed,
)
from potluck.secagg.protocol.primitives.agreement_proof import prove_knowledge
from potluck.secagg.protocol.primitives.masks import Mask
from potluck.secagg.protocol.primitives.thresholds import colluding_clients
from potluck.secagg.protocol.rules import BrokenRuleError, Refusal, Rule, require
from potluck.secagg.protocol.wire.message_encoding import check_names, encode
from potluck.secagg.protocol.wire.messages import (
    Advert,
    Certificate,
    Consent,
    Delivery,
    Envelope,
    MessageType,
    Purpose,
    Reveal,
    RevealedShare,
    RosterMessage,
    SealedShare,
    Secret,
    Shares,
    Survivors,
)
from potluck.secagg.protocol.wire.transcript import (
    Roster,
    build_roster,
    check_advert,
    knowledge_context,
    sharers_digest,
    sign,
    survivors_digest,
)


def advertise(agreed: Agreed, situation: Situation) -> Answer:
    """Make keys and send an advert. It lists the sessions with possibly the same input in which the
    client gave shares.
    """
    keys = SessionKeys.from_random(situation.random(3 * KEY_BYTES))
    header, policy = agreed.header, agreed.party.policy
    promises = keeps_to_one_set(header, policy)
    mask_key = keys.mask_key.public_key().public_bytes_raw()
    committed = commitment(keys.seed, agreed.header_sha256)
    context = knowledge_context(agreed.header_sha256, agreed.client, mask_key, committed)
    advert = Advert(
        header_sha256=agreed.header_sha256,
        client=agreed.client,
        mask_key=mask_key,
        channel_key=keys.channel_key.public_key().public_bytes_raw(),
        commitment=committed,
        channel_proof=prove_knowledge(keys.channel_key, context, situation.random),
        revealed=revealed_sessions(situation.ledger, header, policy) if promises else (),
    )
    envelope = _signed(agreed, MessageType.ADVERT, encode(advert))
    return Answer(Advertised(agreed=agreed, keys=keys, advert=envelope), (envelope,))


def share_secrets(state: Advertised, message: RosterMessage, situation: Situation) -> Answer:
    """Check all clients' adverts, and send shares of both secrets to the neighbours."""
    agreed, keys = state.agreed, state.keys
    me, header = agreed.client, agreed.header
    require(state.advert in message.adverts, Rule.ROSTER, "the roster lacks this client's advert")
    adverts = [
        check_advert(each, agreed.header_sha256, agreed.party.root, situation.now)
        for each in message.adverts
    ]
    roster = build_roster(header, agreed.header_sha256, adverts)
    _check_members(roster, roster.participants, situation)
    check_roster(roster, agreed.party.policy)
    within = agreed.expected.within
    require(
        within is None or within.issuperset(roster.participants),
        Rule.SET,
        "the sum has clients outside the cohort to which the coordinator has committed"
        if agreed.expected.purpose is Purpose.UPDATE
        else "the roster has clients outside this client's cell; all hosts and the run file need "
        "the same members file and sum_hosts",
    )
    entries = _settle(agreed, roster, situation)
    holders = sorted([me, *roster.neighbours[me]])
    require(
        len(holders) >= header.threshold,
        Rule.THRESHOLD,
        f"{len(holders)} clients hold shares, too few for a threshold of {header.threshold}",
    )
    numbers = [roster.participants[holder].number for holder in holders]
    seeds, mask_keys = (
        sharing.share(secret, header.threshold, numbers, situation.random)
        for secret in (keys.seed, keys.mask_key.private_bytes_raw())
    )
    pairs = {
        holder: SharePair(sharing.to_bytes(seed), sharing.to_bytes(mask_key))
        for holder, seed, mask_key in zip(holders, seeds, mask_keys, strict=True)
    }
    own_pair, number = pairs.pop(me), roster.participants[me].number
    channels = {
        other: agree(keys.channel_key, roster.participants[other].advert.channel_key)
        for other in pairs
    }
    sealed = tuple(
        SealedShare(
            other,
            seal_pair(
                pair, channels[other], roster.digest, number, roster.participants[other].number
            ),
        )
        for other, pair in pairs.items()
    )
    reply = _signed(agreed, MessageType.SHARES, encode(Shares(roster.digest, me, sealed)))
    after = Shared(agreed=agreed, keys=keys, roster=roster, own_pair=own_pair, channels=channels)
    return Answer(after, (reply,), entries)


def derive_masks(state: Shared, message: Delivery, situation: Situation) -> Answer:
    """Decrypt the neighbours' shares; agree with each of them on masks for this set of sharers."""
    agreed, roster = state.agreed, state.roster
    me, header = agreed.client, agreed.header
    _check_subset(message.sharers, roster, agreed, within=roster.participants, what="the sharers")
    partners = sorted(roster.neighbours[me].intersection(message.sharers))
    found = [each.client for each in message.shares]
    check_names(found, "the delivered shares")
    require(
        found == partners,
        Rule.SHARE,
        "the delivery lacks shares, or has shares from clients that send no shares",
    )
    number = roster.participants[me].number
    held = {me: state.own_pair}
    for each in message.shares:
        sender = roster.participants[each.client].number
        try:
            held[each.client] = open_pair(
                each.ciphertext, state.channels[each.client], roster.digest, sender, number
            )
        except BrokenRuleError as error:
            refusal = Refusal(error.rule, f"{error.detail}, from client {each.client!r}")
            return accuse(state, message.session_id, each.client, refusal)
    check_charge(situation.ledger, header)
    check_pins(situation.ledger, header, agreed.expected, agreed.party.policy)
    _check_group(agreed, roster, message.sharers, situation.ledger)
    digest = sharers_digest(roster.digest, message.sharers)
    view = View(roster=roster, sharers=message.sharers, sharers_sha256=digest, held=held)
    masking = Masking(agreed=agreed, view=view, masks=_masks(state, partners, digest))
    return Answer(masking, (), _upload_entries(agreed, roster, digest, situation))


def _masks(
    state: Shared, partners: list[str], sharers_sha256: bytes
) -> Mapping[str, tuple[Mask, ...]]:
    roster = state.roster
    number = roster.participants[state.agreed.client].number
    vectors = [vector.name for vector in state.agreed.header.vectors]
    masks = {
        vector: [Mask(self_seed(state.keys.seed, sharers_sha256, number, vector))]
        for vector in vectors
    }
    for partner in partners:
        other = roster.participants[partner]
        secret = agree(state.keys.mask_key, other.advert.mask_key)
        for vector in vectors:
            seed = pair_seed(secret, sharers_sha256, number, other.number, vector)
            masks[vector].append(Mask(seed, negative=number > other.number))
    return {vector: tuple(added) for vector, added in masks.items()}


def consent(state: Uploaded, message: Survivors, situation: Situation) -> Answer:
    """Sign that the sum over this set may be unmasked.

    The session can't sign for another set later.
    """
    agreed, view = state.agreed, state.view
    _check_subset(
        message.clients, view.roster, agreed, within=frozenset(view.sharers), what="the survivors"
    )
    _check_members(view.roster, message.clients, situation)
    _check_set(agreed, message.clients, situation.ledger)
    survivors_sha256 = survivors_digest(view.sharers_sha256, message.clients)
    consent = encode(Consent(view.roster.digest, view.sharers_sha256, survivors_sha256))
    after = Consented(
        agreed=agreed,
        view=view,
        survivors=message.clients,
        consent=consent,
        survivors_sha256=survivors_sha256,
    )
    return Answer(after, (_signed(agreed, MessageType.CONSENT, consent),))


def reveal(state: Consented, message: Certificate, situation: Situation) -> Answer:
    """Check that a quorum consented to the same set; send one share for each sharer."""
    agreed, view = state.agreed, state.view
    me, header, roster = agreed.client, agreed.header, view.roster
    endorsers = [each.client for each in message.endorsements]
    check_names(endorsers, "the endorsements in the certificate")
    require(
        len(endorsers) >= header.quorum,
        Rule.CERTIFICATE,
        f"the certificate has {len(endorsers)} consents, but the quorum is {header.quorum}",
    )
    for each in message.endorsements:
        require(
            each.client in state.survivors,
            Rule.CERTIFICATE,
            "the certificate has a consent of a client that is not a survivor",
        )
        envelope = Envelope(MessageType.CONSENT, state.consent, each.signature)
        agreed.party.root.verify(roster.participants[each.client].record, envelope)
    _check_members(roster, state.survivors, situation)
    # Check again: another session of this client may have ended since the consent.
    _check_set(agreed, state.survivors, situation.ledger)
    survivors = frozenset(state.survivors)
    shares = tuple(
        RevealedShare(
            owner,
            Secret.SEED if owner in survivors else Secret.MASK_KEY,
            pair.take(survived=owner in survivors),
        )
        for owner, pair in sorted(view.held.items())
    )
    reply = encode(Reveal(state.survivors_sha256, me, shares))
    clients = {client: roster.participants[client].record.host for client in state.survivors}
    entry = release_entry(header, agreed.expected.input_id, clients, situation.now)
    return Answer(
        Revealed(survivors=state.survivors),
        (_signed(agreed, MessageType.REVEAL, reply),),
        (entry,),
    )


def _check_subset(
    clients: tuple[str, ...],
    roster: Roster,
    agreed: Agreed,
    *,
    within: Container[str],
    what: str,
) -> None:
    """Check the rules for a set of sharers or survivors. Raises BrokenRuleError."""
    header, me = agreed.header, agreed.client
    check_names(clients, what)
    require(
        all(client in within for client in clients), Rule.SET, f"{what} include an unknown client"
    )
    require(me in clients, Rule.SET, f"{what} don't include this client")
    require(
        len(clients) >= header.quorum,
        Rule.TOO_FEW,
        f"{what} are {len(clients)} clients, but the quorum is {header.quorum}",
    )
    hosts = len(roster.hosts(clients))
    least = max(header.least_hosts, agreed.party.policy.least_hosts)
    require(
        hosts >= least,
        Rule.TOO_FEW,
        f"{what} are on {hosts} hosts, but at least {least} hosts are required",
    )
    holding = len(roster.neighbours[me].intersection(clients)) + 1
    require(
        holding >= header.threshold,
        Rule.TOO_FEW,
        f"{holding} clients that hold this client's shares are left, but {header.threshold} are "
        "needed",
    )


def _check_members(roster: Roster, clients: Iterable[str], situation: Situation) -> None:
    """Check that the keys of these participants were not revoked since the session began."""
    for client in clients:
        key = roster.participants[client].record.public_key
        require(
            (client, key) not in situation.revoked,
            Rule.MEMBER,
            f"the member key of client {client!r} was revoked since the session began",
        )


def _settle(agreed: Agreed, roster: Roster, situation: Situation) -> tuple[LedgerEntry, ...]:
    """Return entries that settle earlier uploads of an input, so that it may be summed again."""
    if not agreed.one_set:
        return ()
    entries = settle(
        situation.ledger,
        agreed.expected.input_id,
        roster,
        agreed.certified,
        client=agreed.client,
        root=agreed.party.root,
        at=situation.now,
    )
    ledger = situation.ledger.with_entries(entries)
    _check_group(agreed, roster, tuple(roster.participants), ledger)
    return entries


def _check_group(agreed: Agreed, roster: Roster, clients: tuple[str, ...], ledger: Ledger) -> None:
    if agreed.one_set:
        colluding = colluding_clients(roster.listed_hosts, agreed.header.colluding_hosts)
        check_group(ledger, agreed.header, agreed.expected.input_id, clients, colluding)


def _check_set(agreed: Agreed, clients: tuple[str, ...], ledger: Ledger) -> None:
    if agreed.one_set:
        check_set(ledger, agreed.header, agreed.expected.input_id, clients)


def _upload_entries(
    agreed: Agreed, roster: Roster, sharers_sha256: bytes, situation: Situation
) -> tuple[LedgerEntry, ...]:
    header, expected, now = agreed.header, agreed.expected, situation.now
    if not keeps_to_one_set(header, agreed.party.policy):
        return (upload_entry(header, expected, None, now),)
    entry = upload_entry(header, expected, session_view(roster, sharers_sha256), now)
    if not agreed.one_set:
        return (entry,)
    return (entry, *in_known_set(situation.ledger, header, expected.input_id, now))


def _signed(agreed: Agreed, kind: MessageType, payload: bytes) -> Envelope:
    return sign(agreed.party.key, kind, payload)
