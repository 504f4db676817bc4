"""Clients that seal shares which can't be decrypted, and false accusations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.secure_sums import NOW, Federation, Run, changed, member_key, sabotage

from potluck.secagg.protocol import (
    BrokenRuleError,
    ClientPolicy,
    Envelope,
    MessageType,
    Rule,
    client,
    decode,
    encode,
    session_record,
)
from potluck.secagg.protocol.client.client_session import Accusing, Masking
from potluck.secagg.protocol.coordinator.coordinator_session import Sharing, Uploading
from potluck.secagg.protocol.primitives import sharing
from potluck.secagg.protocol.primitives.agreement import (
    SharePair,
    agree,
    commitment,
    open_pair,
    public_bytes,
    seal_pair,
)
from potluck.secagg.protocol.primitives.agreement_proof import prove_agreement
from potluck.secagg.protocol.primitives.thresholds import circulant_thresholds
from potluck.secagg.protocol.wire.evidence import Conviction, check_verdict
from potluck.secagg.protocol.wire.messages import (
    Delivery,
    Dispute,
    Evidence,
    GuiltyVerdict,
    RefusalMessage,
    Shares,
    Stage,
)
from potluck.secagg.protocol.wire.transcript import sign

NO_SHARES = SharePair(b"\xff" * 33, b"\xff" * 33)


def sabotaged(sender: str = "f", victims: str = "a", **options: Any) -> Run:
    """Return a session, at the delivery of shares, in which one client's shares for some others
    can't be decrypted."""
    run = Federation(clients=6, **options).run().until(Stage.SHARE)
    sabotage(run, sender, {name: bytes(82) for name in victims})
    run.answer([name for name in run.federation.names if name != sender])
    assert isinstance(run.session.state, Uploading)
    return run


def accusation(run: Run, accuser: str, accused: str) -> Envelope:
    message = RefusalMessage(run.header.session_id, accuser, Rule.SHARE, "it says", accused)
    return sign(member_key(accuser), MessageType.REFUSAL, encode(message))


def made_up(run: Run, key: Any, accuser: str, accused: str) -> Envelope:
    """Return the strongest evidence that an accuser can make with its own key."""
    roster = run.session.state.roster  # type: ignore[union-attr]
    other = roster.participants[accused].advert.channel_key
    context = roster.digest + accused.encode() + b"\0" + accuser.encode()
    proof = prove_agreement(key, other, context, run.generator.randbytes)
    message = Evidence(
        roster.digest, accuser, accused, proof.point, proof.challenge, proof.response
    )
    return sign(member_key(accuser), MessageType.EVIDENCE, encode(message))


def channel_keys(run: Run) -> dict[str, Any]:
    """Return the clients' channel keys, which sessions drop in later stages."""
    return {
        name: session.state.keys.channel_key  # type: ignore[union-attr]
        for name, session in run.sessions.items()
    }


@pytest.mark.parametrize("victims", ["a", "d", "abcde"])
def test_only_the_client_that_sealed_invalid_shares_is_convicted(victims: str) -> None:
    run = sabotaged(victims=victims)
    run.answer(closing=False)
    run.answer(closing=False)
    aborted = run.session.aborted
    assert aborted is not None
    assert aborted.abort.rule is Rule.SHARE
    assert aborted.conviction is not None
    assert (aborted.conviction.accused, aborted.conviction.accuser in victims) == ("f", True)
    assert run.session.refusals == {}  # honest accusers are not refused
    assert aborted.abort.missing == ()
    record = session_record(run.session, NOW)
    assert list(record.convicted) == ["f"]
    found = check_verdict(aborted.verdict, run.federation.root, NOW)
    assert found == aborted.conviction


def test_accusers_do_not_upload_and_all_sessions_end() -> None:
    run = sabotaged(victims="ab")
    run.answer(closing=False)
    assert sorted(run.uploads) == ["c", "d", "e", "f"]
    run.answer(closing=False)
    run.answer(closing=False)
    assert all(session.over for session in run.sessions.values())
    assert run.sessions["a"].masking is None


def test_client_that_seals_shares_outside_the_field_is_convicted() -> None:
    """Otherwise, the holder of such shares could not reveal them, and would be suspected."""
    run = Federation(clients=6).run().until(Stage.SHARE)
    step = run.tell("f", run.pending["f"][0])
    state = step.session.state
    secret, roster = state.channels["a"], state.roster  # type: ignore[union-attr]
    sabotage(run, "f", {"a": seal_pair(NO_SHARES, secret, roster.digest, 6, 1)})
    run.answer(list("abcde"))
    run.answer(closing=False)
    run.answer(closing=False)
    assert run.session.aborted is not None
    assert run.session.aborted.conviction == Conviction("f", "a")


def test_only_the_client_with_a_false_accusation_is_excluded() -> None:
    run = Federation(clients=6).run().until(Stage.SHARE)
    run.answer(closing=False)
    # All sessions are in the stage `Shared`, so they still have their channel keys.
    keys = channel_keys(run)
    run.hear("a", accusation(run, "a", "f"))
    assert run.rejected == []
    dispute = run.pending["a"][-1]
    assert dispute.type is MessageType.DISPUTE
    run.hear("a", made_up(run, keys["a"], "a", "f"))
    assert [each.rule for each in run.rejected] == [Rule.EVIDENCE]
    assert "can be decrypted" in run.rejected[0].detail
    run.pending["a"].clear()
    run.answer(list("bcdef"))
    assert run.finish().is_exact()


@pytest.mark.parametrize(
    "changes",
    [
        {"roster_sha256": bytes(32)},
        {"point": bytes(32)},
        {"point": (1).to_bytes(32, "little")},
        {"challenge": bytes(32)},
        {"response": b"\xff" * 32},
        {"client": "b"},
        {"accused": "e"},
        {"accused": "z"},
    ],
)
def test_invalid_evidence_convicts_no_client(changes: dict[str, Any]) -> None:
    run = Federation(clients=6).run().until(Stage.SHARE)
    sabotage(run, "f", {"a": bytes(82)})
    run.answer(list("abcde"), closing=False)
    keys = channel_keys(run)
    run.hear("a", accusation(run, "a", "f"))
    fork = run.fork()
    honest = decode(Evidence, made_up(run, keys["a"], "a", "f").payload)
    payload = encode(replace(honest, **changes))
    fork.hear("a", sign(member_key("a"), MessageType.EVIDENCE, payload))
    assert len(fork.rejected) == 1
    assert fork.session == run.session
    run.hear("a", made_up(run, keys["a"], "a", "f"))
    assert run.session.aborted is not None
    assert run.session.aborted.conviction == Conviction("f", "a")


def test_proof_of_one_pair_is_refused_for_another_pair() -> None:
    run = Federation(clients=6).run().until(Stage.SHARE)
    sabotage(run, "f", {"a": bytes(82)})
    run.answer(list("abcde"), closing=False)
    keys = channel_keys(run)
    run.hear("b", accusation(run, "b", "f"))
    theirs = decode(Evidence, made_up(run, keys["a"], "a", "f").payload)
    copied = replace(theirs, client="b")
    run.hear("b", sign(member_key("b"), MessageType.EVIDENCE, encode(copied)))
    assert [each.rule for each in run.rejected] == [Rule.EVIDENCE]


def test_accusation_after_the_upload_or_out_of_turn_is_refused() -> None:
    run = sabotaged()
    run.answer(list("bcde"), closing=False)
    for accuser, accused, rule in (
        ("b", "f", Rule.STAGE),
        ("a", "a", Rule.SET),
        ("a", "z", Rule.SET),
    ):
        fork = run.fork()
        fork.hear(accuser, accusation(run, accuser, accused))
        assert [each.rule for each in fork.rejected] == [rule]
        assert fork.session == run.session
    unasked = sign(member_key("a"), MessageType.EVIDENCE, b"")
    fork = run.fork()
    fork.hear("a", unasked)
    assert [each.rule for each in fork.rejected] == [Rule.STAGE]
    # A client that has uploaded has dropped its channel key; a client that has accused has no
    # masks.
    shown = Envelope(
        MessageType.DISPUTE,
        encode(Dispute(run.header.session_id, run.session.state.shares["f"])),  # type: ignore[union-attr]
    )
    step = run.tell("b", shown)
    assert step.refusal is not None
    assert step.refusal.rule is Rule.STAGE
    run.hear("a", accusation(run, "a", "f"))
    assert "a" not in run.uploads
    run.take("a", run.tell("a", run.next("a")))
    with pytest.raises(ValueError, match="nothing can be uploaded"):
        client.uploaded(run.sessions["a"], bytes(32))
    vouched = run.fork()
    forged = sign(member_key("a"), MessageType.MASKED_INPUT, b"")
    vouched.hear("a", forged, bytes(32))
    assert [each.rule for each in vouched.rejected] == [Rule.STAGE]


def test_repeated_accusation_has_one_answer() -> None:
    run = sabotaged()
    run.hear("a", accusation(run, "a", "f"))
    before = len(run.pending["a"])
    run.hear("a", accusation(run, "a", "f"))
    assert (run.rejected, len(run.pending["a"])) == ([], before)
    run.hear("a", accusation(run, "a", "e"))
    assert [each.rule for each in run.rejected] == [Rule.DUPLICATE]


def test_client_is_convicted_by_an_accuser_on_the_same_host() -> None:
    shared = {"a": "one", "f": "one"}
    federation = Federation(clients=6, hosts_of=shared)
    run = federation.run().until(Stage.SHARE)
    sabotage(run, "f", {"a": bytes(82)})
    run.answer(list("abcde"))
    run.answer(closing=False)
    run.answer(closing=False)
    assert run.session.aborted is not None
    assert run.session.aborted.conviction == Conviction("f", "a")


def test_accusation_of_a_client_that_is_not_a_neighbour_is_refused() -> None:
    policy = ClientPolicy(
        least_hosts=5, colluding_hosts=0, circulant=True, disclosures=frozenset({"cells"})
    )
    federation = Federation(clients=24, policy=policy)
    sizes = circulant_thresholds(24, 0, 0)
    assert sizes is not None
    header = federation.header(
        colluding_hosts=0, degree=sizes.degree, threshold=sizes.threshold, quorum=sizes.quorum
    )
    run = federation.run(header).until(Stage.UPLOAD)
    roster = run.session.state.roster  # type: ignore[union-attr]
    far = next(name for name in federation.names if name not in {"a", *roster.neighbours["a"]})
    run.hear("a", accusation(run, "a", far))
    assert [each.rule for each in run.rejected] == [Rule.SET]


# A coordinator that wants evidence against honest clients, which would disclose their sealed
# shares.


def test_share_changed_by_the_coordinator_gives_no_evidence() -> None:
    run = Federation(clients=6).run().until(Stage.UPLOAD)
    envelope = run.next("a")
    message = decode(Delivery, envelope.payload)
    first, *rest = message.shares
    bad = replace(message, shares=(replace(first, ciphertext=bytes(82)), *rest))
    step = run.tell("a", changed(envelope, encode(bad)))
    assert isinstance(step.session.state, Accusing)
    run.sessions["a"] = step.session
    signed = run.session.state.shares  # type: ignore[union-attr]
    other = run.federation.run(run.federation.header(session_id=bytes(16))).until(Stage.UPLOAD)
    forged = replace(decode(Shares, signed["b"].payload), shares=())
    shown = {
        "what it signed": (signed["b"], Rule.SHARE),
        "another's": (signed["c"], Rule.SIGNATURE),
        "of another session": (other.session.state.shares["b"], Rule.EVIDENCE),  # type: ignore[union-attr]
        "without a signature": (changed(signed["b"], encode(forged)), Rule.SIGNATURE),
        "no shares": (run.session.state.roster.adverts[1], Rule.EVIDENCE),  # type: ignore[union-attr]
    }
    for name, (shares, rule) in shown.items():
        dispute = Dispute(run.header.session_id, shares)
        answer = run.tell("a", Envelope(MessageType.DISPUTE, encode(dispute)))
        assert answer.refusal is not None, name
        assert answer.refusal.rule is rule, name
        assert [each.type for each in answer.replies] == [MessageType.REFUSAL], name
        assert answer.session.over


def test_evidence_is_given_once_and_ends_the_session() -> None:
    run = sabotaged(victims="a")
    run.take("a", run.tell("a", run.next("a")))
    [dispute] = run.pending["a"]
    step = run.tell("a", dispute)
    assert [each.type for each in step.replies] == [MessageType.EVIDENCE]
    assert step.session.over
    run.sessions["a"] = step.session
    assert run.tell("a", dispute).repeated
    assert b"PrivateKey" not in repr(step.session).encode()


# Checks of verdicts in session records.


def test_changed_verdict_is_refused() -> None:
    run = sabotaged(victims="a")
    run.answer(closing=False)
    run.answer(closing=False)
    assert run.session.aborted is not None
    root, data = run.federation.root, run.session.aborted.verdict
    verdict = decode(GuiltyVerdict, data)
    honest = Federation(clients=6).run().until(Stage.UPLOAD).session.state
    for changes in (
        {"adverts": verdict.adverts[1:]},
        {"adverts": verdict.adverts[:-1]},
        {"shares": honest.shares["e"]},  # type: ignore[union-attr]
        {"evidence": replace(verdict.evidence, signature=bytes(64))},
        {"header": encode(replace(run.header, run="another"))},
    ):
        with pytest.raises(BrokenRuleError):
            check_verdict(encode(replace(verdict, **changes)), root, NOW)
    with pytest.raises(BrokenRuleError):
        check_verdict(data[:-1], root, NOW)
    assert check_verdict(data, root, NOW) == Conviction("f", "a")


def test_evidence_key_opens_only_messages_between_accuser_and_accused() -> None:
    run = Federation(clients=6).run().until(Stage.SHARE)
    sabotage(run, "f", {"a": bytes(82)})
    run.answer(list("abcde"), closing=False)
    keys = channel_keys(run)
    roster = run.session.state.roster  # type: ignore[union-attr]
    proof = decode(Evidence, made_up(run, keys["a"], "a", "f").payload)
    public = {name: roster.participants[name].advert.channel_key for name in roster.participants}
    y = int.from_bytes(proof.point, "little") % 2**255
    p = 2**255 - 19
    shown = ((1 + y) * pow(1 - y, -1, p) % p).to_bytes(32, "little")
    assert shown == agree(keys["a"], public["f"])
    assert shown not in {agree(keys["a"], public[name]) for name in "bcde"}


# A wrong share that can be decrypted is detected only at the end.


def wrong_dealing(run: Run, sender: str, victims: str) -> None:
    step = run.tell(sender, run.pending[sender][0])
    state = step.session.state
    roster = state.roster  # type: ignore[union-attr]
    numbers = {name: each.number for name, each in roster.participants.items()}
    garbage = {
        name: seal_pair(
            SharePair(bytes(32) + bytes([number]), bytes(32) + bytes([number])),
            state.channels[name],  # type: ignore[union-attr]
            roster.digest,
            numbers[sender],
            number,
        )
        for name, number in numbers.items()
        if name in victims
    }
    sabotage(run, sender, garbage)


@pytest.mark.parametrize(
    ("victims", "suspects"), [("ab", {"c"}), ("a", {"a", "c"})], ids=["two", "one"]
)
def test_client_that_dealt_wrong_shares_is_a_suspect(victims: str, suspects: set[str]) -> None:
    run = Federation(clients=6).run().until(Stage.SHARE)
    wrong_dealing(run, "c", victims)
    run.answer(list("abdef"))
    assert run.finish().is_exact()
    assert run.session.unmasking is not None
    assert set(run.session.unmasking.suspects) == suspects


def test_wrong_shares_for_all_clients_abort_the_sum_and_name_owner_and_holders() -> None:
    run = Federation(clients=6).run().until(Stage.SHARE)
    wrong_dealing(run, "c", "abdef")
    run.answer(list("abdef"))
    run.finish()
    assert run.session.aborted is not None
    assert run.session.aborted.abort.rule is Rule.RECONSTRUCTION
    assert run.session.aborted.suspects == ("c", "a", "b", "d", "e", "f")


def test_masking_starts_after_all_shares_were_opened() -> None:
    run = Federation(clients=6).run().until(Stage.UPLOAD)
    assert isinstance(run.tell("a", run.next("a")).session.state, Masking)
    assert not isinstance(run.session.state, Sharing)


def test_channel_keys_of_accusers_would_unmask_other_clients() -> None:
    """This is why evidence is a proof and not a key: a channel key decrypts shares of both secrets
    of all clients."""
    run = Federation(clients=10).run().until(Stage.SHARE)
    header, colluders, accusers = run.header, "hij", "abcd"
    assert (header.threshold, header.colluding_hosts) == (7, 3)
    sabotage(run, "j", dict.fromkeys(accusers, bytes(82)))
    run.answer(list("abcdefghi"), closing=False)
    keys = channel_keys(run)
    run.answer(closing=False)
    assert set(run.uploads) >= set("efg")  # before any client receives the end of the session
    state = run.session.state
    assert isinstance(state, Uploading)
    for victim in "efg":
        sealed = {
            each.client: each.ciphertext
            for each in decode(Shares, state.shares[victim].payload).shares
        }
        person = state.roster.participants
        opened = {
            name: open_pair(
                sealed[name],
                agree(keys[name], person[victim].advert.channel_key),
                state.roster.digest,
                person[victim].number,
                person[name].number,
            )
            for name in colluders + accusers
        }
        for what, survived in (("commitment", True), ("mask_key", False)):
            shares = {
                person[name].number: sharing.from_bytes(pair.take(survived=survived))
                for name, pair in opened.items()
            }
            secret = sharing.combine(shares)
            assert secret is not None
            of = (
                commitment(secret, state.roster.header_sha256) if survived else public_bytes(secret)
            )
            assert of == getattr(person[victim].advert, what)
