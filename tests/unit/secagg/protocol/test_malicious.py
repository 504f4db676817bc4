"""Lying coordinators and clients are refused by the other party, naming the rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from support.secure_sums import (
    COUNTS,
    HEAD,
    ISSUED,
    NOW,
    Federation,
    Run,
    changed,
    member_key,
)

from potluck.secagg.protocol import (
    BrokenRuleError,
    ClientPolicy,
    Envelope,
    Header,
    Ledger,
    MessageType,
    Noise,
    Purpose,
    Rule,
    StreamCipher,
    client,
    decode,
    encode,
)
from potluck.secagg.protocol.client.client_session import Accusing, Advertised
from potluck.secagg.protocol.coordinator.coordinator_session import Revealing
from potluck.secagg.protocol.coordinator.unmasking import unmask
from potluck.secagg.protocol.primitives import agreement_proof
from potluck.secagg.protocol.primitives.agreement_proof import prove_knowledge
from potluck.secagg.protocol.wire.messages import (
    Advert,
    Certificate,
    Delivery,
    Endorsement,
    Invitation,
    Reveal,
    RosterMessage,
    Secret,
    Shares,
    Stage,
    Survivors,
)
from potluck.secagg.protocol.wire.transcript import knowledge_context, sign


def run_at(stage: Stage, **options: Any) -> Run:
    """Return a session of six honest clients, whose next messages are those of a stage."""
    return Federation(clients=6, **options).run().until(stage)


def refusal(run: Run, envelope: Envelope, name: str = "a") -> Rule:
    """Return the rule that a client names in its refusal; check that its session ends and the
    coordinator receives the refusal."""
    step = run.tell(name, envelope)
    assert step.refusal is not None
    assert step.session.over or isinstance(step.session.state, Accusing)
    assert step.entries == ()
    [reply] = step.replies
    assert reply.type is MessageType.REFUSAL
    return step.refusal.rule


def rejection(run: Run, name: str, envelope: Envelope) -> Rule:
    """Return the rule by which the coordinator refuses a message; check that its session is
    unchanged."""
    fork = run.fork()
    fork.hear(name, envelope)
    assert fork.session == run.session
    assert len(fork.rejected) == len(run.rejected) + 1
    return fork.rejected[-1].rule


def invitation(run: Run, **changes: Any) -> Envelope:
    """Return the invitation with another header."""
    header = replace(run.header, **changes)
    return Envelope(MessageType.INVITATION, encode(Invitation(encode(header))))


# The header against the client's policy.


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"version": 1}, Rule.VERSION),
        ({"federation": "g"}, Rule.VERSION),
        ({"least_hosts": 3}, Rule.POLICY),
        ({"disclosure": "protocol"}, Rule.POLICY),
        ({"degree": 4}, Rule.POLICY),
        ({"degree": 3}, Rule.POLICY),
        ({"threshold": 1}, Rule.THRESHOLD),
        ({"vectors": ()}, Rule.INPUT),
        ({"vectors": (replace(COUNTS, length=6),)}, Rule.INPUT),
        ({"vectors": (COUNTS, HEAD)}, Rule.INPUT),
        ({"vectors": (replace(COUNTS, modulus_bits=32),)}, Rule.WRAP),
        ({"vectors": (replace(COUNTS, modulus_bits=16),)}, Rule.MALFORMED),
        ({"vectors": (replace(COUNTS, clip=2.0**41),)}, Rule.WRAP),
        ({"vectors": (replace(COUNTS, clip=40.0),)}, Rule.WRAP),
        ({"vectors": (replace(COUNTS, clip=float("nan")),)}, Rule.MALFORMED),
        ({"purpose": Purpose.METRIC}, Rule.HEADER),
        ({"model_digest": bytes(32)}, Rule.HEADER),
        ({"training_sha256": bytes(32)}, Rule.HEADER),
        ({"metrics": ("loss",)}, Rule.HEADER),
        ({"issued_at": ISSUED + 600, "expires_at": ISSUED + 900}, Rule.CLOCKS),
        ({"issued_at": ISSUED - 600, "expires_at": ISSUED - 1}, Rule.EXPIRED),
        ({"expires_at": ISSUED + 90_000}, Rule.CLOCKS),
        ({"issued_at": ISSUED - 90_000}, Rule.CLOCKS),
        ({"noise": Noise(epsilon=1.5, sensitivity=2, contributors=3)}, Rule.POLICY),
        ({"noise": Noise(epsilon=float("nan"), sensitivity=2, contributors=3)}, Rule.POLICY),
        ({"noise": Noise(epsilon=0.5, sensitivity=1, contributors=3)}, Rule.POLICY),
        ({"noise": Noise(epsilon=0.5, sensitivity=3, contributors=3)}, Rule.MALFORMED),
        ({"noise": Noise(epsilon=0.5, sensitivity=2, contributors=0)}, Rule.MALFORMED),
        ({"noise": Noise(epsilon=1e-5, sensitivity=2, contributors=3)}, Rule.MALFORMED),
        ({"noise": Noise(epsilon=0.5, sensitivity=2, contributors=3)}, Rule.BUDGET),
    ],
)
def test_session_headers_weaker_than_the_policy_are_refused(
    changes: dict[str, Any], rule: Rule
) -> None:
    run = run_at(Stage.ADVERTISE)
    expected = run.federation.expected(run.header)
    party = run.federation.parties["a"]
    step = client.begin(party, invitation(run, **changes), expected, run.situation("a"))
    assert step.refusal is not None
    assert step.refusal.rule is rule
    assert step.session.over


def test_session_id_that_was_used_before_is_refused() -> None:
    run = run_at(Stage.ADVERTISE)
    step = client.begin(
        run.federation.parties["a"],
        run.next("a"),
        run.federation.expected(run.header),
        run.situation("a"),
        used={run.header.session_id},
    )
    assert step.refusal is not None
    assert step.refusal.rule is Rule.SESSION


def test_cipher_that_the_policy_does_not_allow_is_refused() -> None:
    policy = ClientPolicy(
        ciphers=frozenset({StreamCipher.CHACHA20}), disclosures=frozenset({"cells"})
    )
    run = Federation(clients=6, policy=policy).run()
    assert refusal(run, run.next("a")) is Rule.POLICY


def test_clients_with_different_models_never_form_a_roster() -> None:
    run = Federation(clients=6, purpose=Purpose.UPDATE).run()
    other = replace(run.header, model_digest=bytes([1] * 32))
    step = client.begin(
        run.federation.parties["a"],
        Envelope(MessageType.INVITATION, encode(Invitation(encode(other)))),
        run.federation.expected(other),
        run.situation("a"),
    )
    assert rejection(run, "a", step.replies[0]) is Rule.HEADER
    # If a coordinator accepted this advert, the other clients would refuse.
    honest = run.until(Stage.SHARE)
    message = decode(RosterMessage, honest.pending["b"][0].payload)
    forged = replace(message, adverts=(step.replies[0], *message.adverts[1:]))
    assert refusal(honest, changed(honest.pending["b"][0], encode(forged)), "b") is Rule.HEADER


# The roster.


KEY = bytes([9] * 32)
MINE = X25519PrivateKey.from_private_bytes(bytes([8] * 32))
Edit = Callable[[Run, list[Envelope]], list[Envelope]]


def proven(advert: Advert, private: X25519PrivateKey = MINE) -> Advert:
    """Return an advert with a channel key of one's own, and the proof that one knows it."""
    terms = (advert.header_sha256, advert.client, advert.mask_key, advert.commitment)
    proof = prove_knowledge(private, knowledge_context(*terms), random.Random(1).randbytes)
    key = private.public_key().public_bytes_raw()
    return replace(advert, channel_key=key, channel_proof=proof)


def doubled(key: bytes) -> bytes:
    """Return a public key that is twice another: its owner does not know the private key."""
    _, y, z, _ = agreement_proof._times(2, agreement_proof._lift(key))
    u = (z + y) * pow(z - y, -1, agreement_proof._P) % agreement_proof._P
    return u.to_bytes(32, "little")


def forge(name: str, *, key: Ed25519PrivateKey | None = None, **changes: Any) -> Edit:
    """Replace a client's advert by another, signed with a key that is not its member key."""

    def edit(run: Run, adverts: list[Envelope]) -> list[Envelope]:
        place = run.federation.names.index(name)
        advert = replace(decode(Advert, adverts[place].payload), **changes)
        signer = key or member_key("mallory")
        adverts[place] = sign(signer, MessageType.ADVERT, encode(advert))
        return adverts

    return edit


def replayed(run: Run, adverts: list[Envelope]) -> list[Envelope]:
    other = run.federation.run(run.federation.header(session_id=bytes(16))).until(Stage.SHARE)
    return [adverts[0], *decode(RosterMessage, other.pending["a"][0].payload).adverts[1:]]


def shared_key(run: Run, adverts: list[Envelope]) -> list[Envelope]:
    theirs = decode(Advert, adverts[1].payload)
    mine = proven(replace(decode(Advert, adverts[5].payload), mask_key=theirs.mask_key))
    return [*adverts[:5], sign(member_key("f"), MessageType.ADVERT, encode(mine))]


def shared_channel_key(run: Run, adverts: list[Envelope]) -> list[Envelope]:
    forged = [
        sign(member_key(name), MessageType.ADVERT, encode(proven(decode(Advert, each.payload))))
        for name, each in zip("ef", adverts[4:], strict=True)
    ]
    return [*adverts[:4], *forged]


def related_key(change: Callable[[bytes], bytes]) -> Edit:
    """Replace f's channel key by one that is computed from e's."""

    def edit(run: Run, adverts: list[Envelope]) -> list[Envelope]:
        theirs = decode(Advert, adverts[4].payload)
        changes = {"channel_key": change(theirs.channel_key), "channel_proof": theirs.channel_proof}
        return forge("f", key=member_key("f"), **changes)(run, adverts)

    return edit


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (forge("f"), Rule.SIGNATURE),
        (forge("f", key=member_key("f"), client="g"), Rule.MEMBER),
        (replayed, Rule.HEADER),
        (shared_key, Rule.DUPLICATE),
        (shared_channel_key, Rule.DUPLICATE),
        (related_key(lambda key: key), Rule.KEY),
        (related_key(lambda key: key[:31] + bytes([key[31] | 128])), Rule.KEY),
        (related_key(doubled), Rule.KEY),
        (forge("f", key=member_key("f"), mask_key=KEY), Rule.KEY),
        (lambda run, adverts: [*adverts[:5], adverts[4]], Rule.DUPLICATE),
        (lambda run, adverts: adverts[::-1], Rule.MALFORMED),
        (lambda run, adverts: adverts[1:], Rule.ROSTER),
        (forge("a", key=member_key("a"), channel_key=KEY), Rule.ROSTER),
        (lambda run, adverts: adverts[:3], Rule.TOO_FEW),
        (lambda run, adverts: [adverts[0]], Rule.TOO_FEW),
        (
            lambda run, adverts: [*adverts[:5], replace(adverts[5], type=MessageType.SHARES)],
            Rule.MALFORMED,
        ),
        (
            forge("f", key=member_key("f"), mask_key=bytes(32), channel_key=bytes(32)),
            Rule.DUPLICATE,
        ),
    ],
)
def test_forged_rosters_are_refused(edit: Edit, rule: Rule) -> None:
    run = run_at(Stage.SHARE)
    envelope = run.next("a")
    message = decode(RosterMessage, envelope.payload)
    forged = replace(message, adverts=tuple(edit(run, list(message.adverts))))
    assert refusal(run, changed(envelope, encode(forged))) is rule


def test_roster_with_a_key_of_low_order_is_refused() -> None:
    run = run_at(Stage.SHARE)
    envelope = run.next("a")
    message = decode(RosterMessage, envelope.payload)
    forged = forge("f", key=member_key("f"), channel_key=bytes(32))(run, list(message.adverts))
    bad = changed(envelope, encode(replace(message, adverts=tuple(forged))))
    assert refusal(run, bad) is Rule.KEY


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"threshold": 3}, Rule.THRESHOLD),
        ({"quorum": 3}, Rule.THRESHOLD),
        ({"colluding_hosts": 0}, Rule.POLICY),
        ({"noise": Noise(epsilon=0.5, sensitivity=2, contributors=4)}, Rule.POLICY),
    ],
)
def test_thresholds_below_the_minimum_for_the_roster_are_refused(
    changes: dict[str, Any], rule: Rule
) -> None:
    federation = Federation(clients=6)
    ledgers = {name: Ledger(epsilon_budget=1.0) for name in federation.names}
    run = federation.run(federation.header(**changes), ledgers=ledgers).until(Stage.SHARE)
    assert refusal(run, run.next("a")) is rule


# Shares.


def delivery(run: Run, name: str = "a") -> tuple[Envelope, Delivery]:
    [envelope] = run.pending[name]
    return envelope, decode(Delivery, envelope.payload)


def test_changed_swapped_or_missing_ciphertexts_are_refused() -> None:
    run = run_at(Stage.UPLOAD)
    envelope, message = delivery(run)
    first, second, *rest = message.shares
    flipped = replace(first, ciphertext=bytes([first.ciphertext[0] ^ 1]) + first.ciphertext[1:])
    swapped = [
        replace(first, ciphertext=second.ciphertext),
        replace(second, ciphertext=first.ciphertext),
    ]
    for shares in ([flipped, second, *rest], [*swapped, *rest], [second, *rest]):
        bad = changed(envelope, encode(replace(message, shares=tuple(shares))))
        assert refusal(run, bad) is Rule.SHARE
    others, _ = delivery(run, "b")
    assert refusal(run, others) is Rule.SHARE  # shares for another client
    extra = (*message.sharers, "z")
    bad = changed(envelope, encode(replace(message, sharers=extra)))
    assert refusal(run, bad) is Rule.SET
    small = replace(message, sharers=("a", "b", "c"), shares=message.shares[:2])
    assert refusal(run, changed(envelope, encode(small))) is Rule.TOO_FEW
    without = replace(message, sharers=("b", "c", "d", "e", "f"))
    assert refusal(run, changed(envelope, encode(without))) is Rule.SET


@pytest.mark.parametrize(
    ("purpose", "why"),
    [
        pytest.param(Purpose.HISTOGRAM, "outside this client's cell", id="counts"),
        pytest.param(Purpose.UPDATE, "outside the cohort to which", id="updates"),
    ],
)
def test_a_sum_with_clients_that_do_not_belong_to_it_is_refused(purpose: Purpose, why: str) -> None:
    run = run_at(Stage.SHARE, purpose=purpose)
    state = run.sessions["a"].state
    assert isinstance(state, Advertised)
    expected = replace(state.agreed.expected, within=frozenset("abcde"))
    state = replace(state, agreed=replace(state.agreed, expected=expected))
    run.sessions["a"] = replace(run.sessions["a"], state=state)
    step = run.tell("a", run.next("a"))
    assert step.refusal is not None
    assert step.refusal.rule is Rule.SET
    assert why in step.refusal.detail


def test_clients_with_different_sharer_sets_never_consent_to_one_sum() -> None:
    run = run_at(Stage.UPLOAD)
    envelope, message = delivery(run, "f")
    split = replace(message, sharers=("b", "c", "d", "e", "f"), shares=message.shares[1:])
    run.next("f")
    run.pending["f"] = [changed(envelope, encode(split))]
    run.answer()
    # An honest coordinator detects it at once: the vector is masked for another set of sharers.
    assert [each.rule for each in run.rejected] == [Rule.SET]


# Consent and certificate.


def test_client_consents_to_only_one_survivor_set() -> None:
    run = run_at(Stage.CONSENT)
    [first] = run.pending["a"]
    step = run.tell("a", first)
    run.sessions["a"] = step.session
    again = run.tell("a", first)
    assert again.repeated
    assert again.replies == step.replies  # a repeated message gets the same answer
    message = decode(Survivors, first.payload)
    other = changed(first, encode(replace(message, clients=message.clients[:-1])))
    assert refusal(run, other) is Rule.STAGE


@pytest.mark.parametrize(
    ("clients", "rule"),
    [
        ("bcdef", Rule.SET),  # without the client itself
        ("abcdez", Rule.SET),
        ("abc", Rule.TOO_FEW),
        ("", Rule.SET),
        ("abcdfe", Rule.MALFORMED),
        ("abcdee", Rule.DUPLICATE),
    ],
)
def test_invalid_survivor_sets_are_refused(clients: str, rule: Rule) -> None:
    run = run_at(Stage.CONSENT)
    envelope = run.next("a")
    message = Survivors(run.header.session_id, tuple(clients))
    assert refusal(run, changed(envelope, encode(message))) is rule


def certificate(run: Run, name: str = "a") -> tuple[Envelope, list[Endorsement]]:
    [envelope] = run.pending[name]
    return envelope, list(decode(Certificate, envelope.payload).endorsements)


def test_certificate_without_a_quorum_of_distinct_consents_is_refused() -> None:
    run = run_at(Stage.REVEAL)
    envelope, given = certificate(run)
    assert len(given) == run.header.quorum == 4

    def refused(endorsements: list[Endorsement]) -> Rule:
        message = Certificate(run.header.session_id, tuple(endorsements))
        return refusal(run, changed(envelope, encode(message)))

    assert refused(given[:3]) is Rule.CERTIFICATE
    assert refused([*given[:3], given[2]]) is Rule.DUPLICATE
    assert refused([*given[:3], replace(given[3], client="f")]) is Rule.SIGNATURE
    assert refused([*given[:3], replace(given[3], client="z")]) is Rule.CERTIFICATE
    forged = sign(member_key("mallory"), MessageType.CONSENT, b"").signature
    assert refused([*given[:3], replace(given[3], signature=forged)]) is Rule.SIGNATURE


def test_certificate_for_another_survivor_set_is_refused() -> None:
    # Set substitution: a client that consented to a smaller set receives five consents to the whole
    # set.
    run = run_at(Stage.CONSENT)
    victim = run.fork()
    smaller = Survivors(run.header.session_id, tuple("abcde"))
    victim.take("a", victim.tell("a", changed(victim.next("a"), encode(smaller))))
    run.answer(closing=False)
    [envelope] = run.pending["a"]
    assert refusal(victim, envelope) is Rule.SIGNATURE


def test_second_unmasking_of_a_session_is_refused() -> None:
    run = run_at(Stage.REVEAL)
    [envelope] = run.pending["a"]
    step = run.tell("a", envelope)
    assert step.refusal is None
    run.sessions["a"] = step.session
    assert run.tell("a", envelope).replies == step.replies
    message = Survivors(run.header.session_id, tuple("abcde"))
    later = run.tell("a", Envelope(MessageType.SURVIVORS, encode(message)))
    assert later.replies == ()
    assert later.refusal is not None
    assert later.refusal.rule is Rule.STAGE
    assert b"share" not in repr(step.session).encode()


@pytest.mark.parametrize("stage", [each for each in Stage if each is not Stage.ADVERTISE])
def test_message_of_another_session_or_stage_ends_the_session(stage: Stage) -> None:
    run = run_at(stage)
    [envelope] = run.pending["a"]
    other = run.federation.run(run.federation.header(session_id=bytes(16))).until(stage)
    assert refusal(run, other.pending["a"][0]) is Rule.SESSION
    wrong = Stage.REVEAL if stage is not Stage.REVEAL else Stage.UPLOAD
    out_of_turn = run_at(wrong).pending["a"][0]
    assert refusal(run, out_of_turn) is Rule.STAGE
    assert refusal(run, Envelope(MessageType.CONSENT, b"")) is Rule.STAGE
    assert refusal(run, replace(envelope, signature=bytes(64))) is Rule.MALFORMED
    assert refusal(run, replace(envelope, payload=envelope.payload + b"\x98\x06\x01")) is (
        Rule.MALFORMED
    )


def test_expired_session_is_refused() -> None:
    run = run_at(Stage.REVEAL)
    [envelope] = run.pending["a"]
    late = replace(run.situation("a"), now=NOW + timedelta(seconds=600))
    step = client.handle(run.sessions["a"], envelope, late)
    assert step.refusal is not None
    assert step.refusal.rule is Rule.EXPIRED


# Lying clients, detected by the coordinator.


def test_coordinator_refuses_a_message_of_a_client_of_another_host() -> None:
    run = run_at(Stage.ADVERTISE)
    genuine = run.tell("f", run.pending["f"][0]).replies[0]
    advert = decode(Advert, genuine.payload)
    key = member_key("f")

    other = sign(key, MessageType.ADVERT, encode(proven(advert)))
    elsewhere = Federation(clients=6, hosts_of={"f": "h-elsewhere"})
    moved = replace(run.session.setup, root=elsewhere.root)
    run.session = replace(run.session, setup=moved)
    assert rejection(run, "f", genuine) is Rule.MEMBER
    run.session = replace(run.session, setup=replace(moved, root=run.federation.root))
    assert rejection(run, "e", genuine) is Rule.MEMBER
    assert rejection(run, "z", genuine) is Rule.MEMBER
    run.hear("f", genuine)
    assert run.rejected == []
    run.hear("f", genuine)  # a repeated message has no effect
    assert run.rejected == []
    assert rejection(run, "f", other) is Rule.DUPLICATE


@pytest.mark.parametrize("key", ["mask_key", "channel_key"])
def test_only_the_client_with_a_key_of_low_order_is_excluded(key: str) -> None:
    run = run_at(Stage.ADVERTISE)
    run.answer(list("abcde"), closing=False)
    genuine = Federation(clients=6).run()
    advert = decode(Advert, genuine.tell("f", genuine.next("f")).replies[0].payload)
    bad = replace(advert, channel_key=bytes(32))
    if key == "mask_key":
        bad = proven(replace(advert, mask_key=bytes(32)))
    run.hear("f", sign(member_key("f"), MessageType.ADVERT, encode(bad)))
    assert [each.rule for each in run.rejected] == [Rule.KEY]
    run.close()
    assert run.finish().is_exact()


def test_only_the_client_that_copies_a_key_is_excluded() -> None:
    run = run_at(Stage.ADVERTISE)
    run.answer(list("abcde"), closing=False)
    theirs = run.sessions["b"].said[0]
    advert = replace(decode(Advert, theirs.payload), client="f")
    run.hear("f", sign(member_key("f"), MessageType.ADVERT, encode(advert)))
    assert [each.rule for each in run.rejected] == [Rule.KEY]
    run.close()
    assert run.finish().is_exact()


def test_vector_other_than_the_signed_one_is_refused() -> None:
    run = run_at(Stage.UPLOAD)
    step = run.tell("a", run.next("a"))
    vouched = client.uploaded(step.session, bytes(32)).replies[0]
    fork = run.fork()
    fork.hear("a", vouched, bytes([1] * 32))
    fork.hear("a", vouched, None)
    assert [each.rule for each in fork.rejected] == [Rule.UPLOAD, Rule.UPLOAD]
    with pytest.raises(ValueError, match="nothing can be uploaded"):
        client.uploaded(run.sessions["b"], bytes(32))


def test_shares_for_clients_other_than_the_neighbours_are_refused() -> None:
    run = run_at(Stage.SHARE)
    [reply] = run.tell("a", run.next("a")).replies
    message = decode(Shares, reply.payload)
    fewer = replace(message, shares=message.shares[1:])
    assert rejection(run, "a", sign(member_key("a"), reply.type, encode(fewer))) is Rule.SHARE
    other = replace(message, roster_sha256=bytes(32))
    assert rejection(run, "a", sign(member_key("a"), reply.type, encode(other))) is Rule.ROSTER


def revealed(run: Run, name: str, liars: Collection[str], owners: Collection[str]) -> Envelope:
    """Return a client's reveal; that of a liar has wrong shares of some owners' secrets, and a
    valid signature."""
    [reply] = run.tell(name, run.next(name)).replies
    if name not in liars:
        return reply
    message = decode(Reveal, reply.payload)
    shares = tuple(
        replace(each, share=bytes(32) + name[-1].encode()) if each.owner in owners else each
        for each in message.shares
    )
    return sign(member_key(name), reply.type, encode(replace(message, shares=shares)))


def corrupt(run: Run, liars: Collection[str], owners: Collection[str]) -> None:
    """Let some clients reveal wrong shares of some owners' secrets."""
    for name in run.federation.names:
        run.hear(name, revealed(run, name, liars, owners))


@pytest.mark.parametrize("liars", ["a", "b", "f", "ab", "af"])
def test_sum_is_exact_despite_wrong_shares_if_enough_are_correct(liars: str) -> None:
    run = run_at(Stage.REVEAL)
    corrupt(run, liars, "abcdef")
    assert run.is_exact()
    unmasking = run.session.unmasking
    assert unmasking is not None
    # Liars are suspected only if their shares arrived before the sum was known; later messages are
    # ignored.
    assert set(unmasking.suspects) <= set(liars)
    assert unmasking.suspects or liars == "f"


@pytest.mark.parametrize(
    ("clients", "threshold", "liars"),
    [
        (5, 4, "a"),
        (24, 16, "fj"),
        (24, 16, "abcd"),
        (60, 40, ["c020", "c030"]),
        pytest.param(128, 86, ["c060"], marks=pytest.mark.slow),
    ],
)
def test_suspects_are_exactly_the_clients_that_revealed_wrong_shares(
    clients: int, threshold: int, liars: Collection[str]
) -> None:
    run = Federation(clients=clients).run().until(Stage.REVEAL)
    state, names = run.session.state, run.federation.names
    assert isinstance(state, Revealing)
    assert run.header.threshold == threshold
    reveals = {name: decode(Reveal, revealed(run, name, liars, names).payload) for name in names}
    unmasking = unmask(state.roster, state.sharers_sha256, state.sharers, names, reveals)
    assert unmasking.suspects == tuple(sorted(liars))
    [words] = run.masked_sum(unmasking).values()
    unmasking.remove("counts", words)
    assert words.tolist() == run.true_sum(names)["counts"].tolist()


def test_four_liars_of_24_do_not_prevent_the_sum() -> None:
    run = Federation(clients=24).run().until(Stage.REVEAL)
    corrupt(run, "abcd", run.federation.names)
    assert run.is_exact()
    assert run.session.unmasking is not None
    assert run.session.unmasking.suspects == tuple("abcd")


@pytest.mark.parametrize("clients", [6, 24])
def test_too_many_wrong_shares_abort_the_sum_and_name_owner_and_holders(clients: int) -> None:
    run = Federation(clients=clients).run().until(Stage.REVEAL)
    names = run.federation.names
    corrupt(run, names[: clients - run.header.threshold + 1], "d")
    aborted = run.session.aborted
    assert aborted is not None
    assert aborted.abort.rule is Rule.RECONSTRUCTION
    assert aborted.suspects == ("d", *(name for name in names if name != "d"))


def test_coordinator_refuses_shares_of_the_wrong_secret_or_form() -> None:
    run = run_at(Stage.REVEAL)
    [reply] = run.tell("a", run.next("a")).replies
    message = decode(Reveal, reply.payload)
    first, *rest = message.shares
    for shares in (
        [replace(first, secret=Secret.MASK_KEY), *rest],
        [replace(first, share=b"\xff" * 33), *rest],
        rest,
    ):
        bad = sign(member_key("a"), reply.type, encode(replace(message, shares=tuple(shares))))
        assert rejection(run, "a", bad) is Rule.SHARE
    other = replace(message, survivors_sha256=bytes(32))
    bad = sign(member_key("a"), reply.type, encode(other))
    assert rejection(run, "a", bad) is Rule.SET
    assert rejection(run, "b", reply) is Rule.SIGNATURE


def test_refusal_of_a_client_is_signed_and_recorded() -> None:
    run = run_at(Stage.SHARE)
    envelope = run.next("a")
    step = run.tell("a", replace(envelope, payload=b"?"))
    assert rejection(run, "b", step.replies[0]) is Rule.MEMBER
    run.hear("a", step.replies[0])
    assert run.session.refusals["a"].rule is Rule.MALFORMED
    run.answer(list("bcdef"))
    assert run.finish().is_exact()


@pytest.mark.parametrize("kind", [Header, Advert, RosterMessage, Reveal])
def test_undecodable_bytes_are_refused_as_malformed(kind: type[Any]) -> None:
    for data in (b"\xff", b"\x08", b"\x0a\x05ab", bytes(40), b"\x12\x04\xff\xff\xff\xff"):
        with pytest.raises(BrokenRuleError) as refused:
            decode(kind, data)
        assert refused.value.rule is Rule.MALFORMED
