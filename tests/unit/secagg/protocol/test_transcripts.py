"""All transcripts: flipped bits are rejected, one kind of share per client, inputs stay hidden."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scipy import stats
from support.secure_sums import COUNTS, Federation, Run, member_key, sabotage

from potluck.secagg.protocol import Envelope, MessageType, Rule, SumVector, client, decode, encode
from potluck.secagg.protocol.client.client_session import Accusing
from potluck.secagg.protocol.coordinator.coordinator_session import Consenting, Revealing, Uploading
from potluck.secagg.protocol.primitives.agreement import SharePair
from potluck.secagg.protocol.wire.messages import (
    Certificate,
    Consent,
    Delivery,
    Dispute,
    Endorsement,
    Evidence,
    Reveal,
    Secret,
    Stage,
    Survivors,
)
from potluck.secagg.protocol.wire.transcript import sharers_digest, sign, survivors_digest

FLIPPED = "c"
"""The client whose messages are damaged in both directions."""


def flips(data: bytes, step: int) -> Iterator[bytes]:
    """Yield the data with one bit changed, for every `step`-th bit."""
    for bit in range(0, 8 * len(data), step):
        yield data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def damaged(envelope: Envelope, step: int) -> Iterator[Envelope]:
    """Yield the envelope with one bit of its payload or signature changed."""
    for payload in flips(envelope.payload, step):
        yield replace(envelope, payload=payload)
    for signature in flips(envelope.signature, step):
        yield replace(envelope, signature=signature)


def check_flips(step: int) -> int:
    """Change bits in all messages from and to one of five clients; return the number of changes."""
    run = Federation(clients=5).run()
    count = 0
    while not run.session.over:
        [heard] = run.pending[FLIPPED]
        honest = run.tell(FLIPPED, heard)
        for bad in damaged(heard, step):
            count += 1
            answer = run.tell(FLIPPED, bad)
            if answer.refusal is not None:
                assert answer.session.over or isinstance(answer.session.state, Accusing)
                continue
            # The client answered, since it can't check the changed field yet. The coordinator
            # rejects the answer.
            assert heard.type is MessageType.INVITATION
            fork = run.fork()
            fork.sessions[FLIPPED] = answer.session
            for reply in answer.replies:
                fork.hear(FLIPPED, reply)
            assert len(fork.rejected) == 1
        replies, digest = honest.replies, None
        if honest.session.masking is not None:
            run.sessions[FLIPPED] = honest.session
            digest = run.upload(FLIPPED)
            replies = client.uploaded(honest.session, digest).replies
        for said in replies:
            for bad in damaged(said, step):
                count += 1
                fork = run.fork()
                fork.hear(FLIPPED, bad, digest)
                assert len(fork.rejected) == 1
                assert fork.session == run.session
        run.answer()
    assert run.is_exact()
    return count


def test_sampled_changed_bits_in_messages_are_refused() -> None:
    assert check_flips(step=47) > 500


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_changed_bit_in_messages_is_refused() -> None:
    assert check_flips(step=1) > 25_000


class Coordinator(RuleBasedStateMachine):
    """A coordinator that sends any messages in any order; one of six clients may collude.

    The colluder may seal garbage for some clients. In every case, no client gives both shares of
    another client, none consents twice, and evidence exists only against the colluder.
    """

    @initialize(depth=st.sampled_from(list(Stage)), victims=st.sets(st.sampled_from("abcde")))
    def begin(self, depth: Stage, victims: set[str]) -> None:
        self.run_ = Federation(clients=6).run(seed=3).until(Stage.SHARE)
        self.evidence: dict[str, set[str]] = defaultdict(set)
        self.signed: Mapping[str, Envelope] = {}
        if depth is Stage.ADVERTISE:
            self.run_ = Federation(clients=6).run(seed=3)
        elif depth is not Stage.SHARE:
            sabotage(self.run_, "f", dict.fromkeys(victims, bytes(82)))
            self.run_.answer()
            state = self.run_.session.state
            assert isinstance(state, Uploading)
            self.signed = state.shares
            self.run_.until(depth)
        self.revealed: dict[str, dict[str, set[Secret]]] = defaultdict(lambda: defaultdict(set))
        self.consents: dict[str, set[bytes]] = defaultdict(set)
        self.signatures: dict[tuple[str, ...], dict[str, bytes]] = defaultdict(dict)

    def say(self, name: str, envelope: Envelope) -> None:
        """Send a message to a client and keep its answer; its session continues."""
        if name not in self.run_.sessions and envelope.type is not MessageType.INVITATION:
            return
        step = self.run_.tell(name, envelope)
        self.run_.sessions[name] = step.session
        replies = step.replies
        if step.session.masking is not None:
            self.run_.upload(name)
        for reply in replies:
            if reply.type is MessageType.REVEAL:
                for each in decode(Reveal, reply.payload).shares:
                    self.revealed[name][each.owner].add(each.secret)
            elif reply.type is MessageType.EVIDENCE:
                self.evidence[name].add(decode(Evidence, reply.payload).accused)
            elif reply.type is MessageType.CONSENT:
                self.consents[name].add(reply.payload)
                if envelope.type is MessageType.SURVIVORS:
                    asked = decode(Survivors, envelope.payload).clients
                    self.signatures[asked][name] = reply.signature

    names = st.sampled_from("abcdef")

    @rule(name=names)
    def honest(self, name: str) -> None:
        if self.run_.pending[name]:
            self.say(name, self.run_.next(name))

    @rule()
    def honest_to_all(self) -> None:
        if not self.run_.session.over:
            self.run_.answer()

    @rule(name=names, survivors=st.sets(names, min_size=3))
    def survivors(self, name: str, survivors: set[str]) -> None:
        message = Survivors(self.run_.header.session_id, tuple(sorted(survivors)))
        self.say(name, Envelope(MessageType.SURVIVORS, encode(message)))

    @rule(name=names, survivors=st.sets(names, min_size=3), padded=st.booleans())
    def certificate(self, name: str, survivors: set[str], padded: bool) -> None:
        asked = tuple(sorted(survivors))
        given = dict(self.signatures[asked])
        session = self.run_.session.collecting
        if isinstance(session, Uploading | Consenting | Revealing):
            wanted = encode(
                Consent(
                    session.roster.digest,
                    session.sharers_sha256,
                    survivors_digest(session.sharers_sha256, asked),
                )
            )
            # The colluder signs everything; signatures of the other clients are invented.
            given["f"] = sign(member_key("f"), MessageType.CONSENT, wanted).signature
        if padded:
            given |= {other: bytes(64) for other in asked if other not in given}
        endorsements = tuple(Endorsement(who, given[who]) for who in sorted(given))
        message = Certificate(self.run_.header.session_id, endorsements)
        self.say(name, Envelope(MessageType.CERTIFICATE, encode(message)))

    @rule(name=names, sharers=st.sets(names, min_size=3))
    def delivery(self, name: str, sharers: set[str]) -> None:
        waiting = [e for e in self.run_.pending[name] if e.type is MessageType.DELIVERY]
        if waiting:
            message = decode(Delivery, waiting[0].payload)
            kept = tuple(each for each in message.shares if each.client in sharers)
            forged = replace(message, sharers=tuple(sorted(sharers)), shares=kept)
            self.say(name, replace(waiting[0], payload=encode(forged)))

    @rule(name=names, sender=names)
    def damaged_share(self, name: str, sender: str) -> None:
        waiting = [e for e in self.run_.pending[name] if e.type is MessageType.DELIVERY]
        if waiting:
            message = decode(Delivery, waiting[0].payload)
            shares = [
                replace(each, ciphertext=bytes(82)) if each.client == sender else each
                for each in message.shares
            ]
            forged = replace(message, shares=tuple(shares))
            self.say(name, replace(waiting[0], payload=encode(forged)))

    @rule(name=names, accused=names)
    def dispute(self, name: str, accused: str) -> None:
        if accused in self.signed:
            message = Dispute(self.run_.header.session_id, self.signed[accused])
            self.say(name, Envelope(MessageType.DISPUTE, encode(message)))

    @rule(name=names, other=names)
    def crossed(self, name: str, other: str) -> None:
        if self.run_.pending[other]:
            self.say(name, self.run_.pending[other][0])

    @invariant()
    def one_share_of_each_owner(self) -> None:
        for owners in getattr(self, "revealed", {}).values():
            assert all(len(kinds) == 1 for kinds in owners.values())

    @invariant()
    def one_consent(self) -> None:
        assert all(len(given) == 1 for given in getattr(self, "consents", {}).values())

    @invariant()
    def evidence_is_against_the_colluder_and_instead_of_an_upload(self) -> None:
        for name, accused in getattr(self, "evidence", {}).items():
            assert accused == {"f"}
            assert name not in self.run_.uploads

    @invariant()
    def no_secret_can_be_rebuilt_twice(self) -> None:
        """Over all clients, one of an owner's two secrets has fewer revealed shares than the
        threshold."""
        kinds: dict[str, dict[Secret, int]] = defaultdict(lambda: defaultdict(int))
        for owners in getattr(self, "revealed", {}).values():
            for owner, given in owners.items():
                for kind in given:
                    kinds[owner][kind] += 1
        for given_of in kinds.values():
            assert min(given_of[Secret.SEED], given_of[Secret.MASK_KEY]) + 1 < 4


TestCoordinator = Coordinator.TestCase
TestCoordinator.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def test_share_pair_has_only_the_methods_take_and_packed() -> None:
    assert [name for name in vars(SharePair) if not name.startswith("_")] == ["take", "packed"]


def test_view_of_colluders_depends_only_on_the_sum() -> None:
    """Two pairs of inputs of the two honest clients have the same sum, so the views must be
    indistinguishable.

    The masked vectors of the honest clients are compared statistically, and their sums exactly:
    coordinator and colluders can compute nothing else.
    """

    def seen(first: int, seed: int) -> Run:
        values = {"a": first, "b": 1000 - first}

        def inputs(name: str, vector: SumVector) -> np.ndarray[Any, Any]:
            return np.full(vector.length, values.get(name, 5), np.uint64)

        federation = Federation(clients=6)
        vectors = (replace(COUNTS, length=4000),)
        return federation.run(federation.header(vectors=vectors), seed=seed, inputs=inputs).finish()

    one, other = seen(0, 1), seen(1000, 2)
    for name in "ab":
        first, second = (run.uploads[name]["counts"].astype(np.float64) for run in (one, other))
        alike: Any = stats.ks_2samp(first, second)
        assert alike.pvalue > 1e-4
    assert np.array_equal(one.total()["counts"], other.total()["counts"])


def test_no_message_contains_an_input() -> None:
    """Counts are unique numbers of 40 bits; none occurs in a message, ledger or masked vector."""
    generator = random.Random(11)
    canaries = {name: [generator.randrange(2**39, 2**40) for _ in range(5)] for name in "abcdef"}

    def inputs(name: str, vector: SumVector) -> np.ndarray[Any, Any]:
        return np.array(canaries[name], "<u8")

    run = Federation(clients=6).run(inputs=inputs)
    traffic: list[bytes] = []
    while not run.session.over:
        traffic += [encode(each) for queue in run.pending.values() for each in queue]
        run.answer()
        traffic += [encode(each) for session in run.sessions.values() for each in session.said]
    assert run.is_exact()
    traffic += [words.tobytes() for vectors in run.uploads.values() for words in vectors.values()]
    traffic += [ledger.model_dump_json().encode() for ledger in run.ledgers.values()]
    traffic.append(repr((run.session, run.sessions)).encode())
    assert len(traffic) > 50
    haystack = b"|".join(traffic)
    for values in canaries.values():
        for value in values:
            for needle in (
                value.to_bytes(5, "little"),
                value.to_bytes(5, "big"),
                varint(value),
                str(value).encode(),
            ):
                assert needle not in haystack


def varint(value: int) -> bytes:
    groups = []
    while value:
        value, low = value >> 7, value & 127
        groups.append(low | (128 if value else 0))
    return bytes(groups)


def test_masks_depend_on_the_set_of_sharers() -> None:
    """With another set of sharers, the same keys give other masks."""
    run = Federation(clients=6).run().until(Stage.UPLOAD)
    [envelope] = run.pending["a"]
    message = decode(Delivery, envelope.payload)
    smaller = replace(message, sharers=tuple("abcde"), shares=message.shares[:-1])
    masks = []
    for each in (message, smaller):
        step = run.tell("a", replace(envelope, payload=encode(each)))
        assert step.session.masking is not None
        masks.append({mask.seed for mask in step.session.masking.masks["counts"]})
    assert masks[0].isdisjoint(masks[1])
    digests = {sharers_digest(bytes(32), tuple(names)) for names in ("abc", "abd", "ab", "abcd")}
    assert len(digests) == 4


def test_every_rule_is_parsed_from_its_name() -> None:
    assert all(Rule(str(each)) is each for each in Rule)
