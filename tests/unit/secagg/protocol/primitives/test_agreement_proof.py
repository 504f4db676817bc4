"""Proofs of the secret that two keys agree on."""

from __future__ import annotations

import hashlib
import random

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.secagg.protocol.primitives import agreement_proof
from potluck.secagg.protocol.primitives.agreement import public_bytes
from potluck.secagg.protocol.primitives.agreement_proof import (
    AgreementProof,
    check_knowledge,
    prove_agreement,
    prove_knowledge,
    proven_agreement,
)
from potluck.secagg.protocol.rules import BrokenRuleError, Rule

P = 2**255 - 19
KEYS = st.binary(min_size=32, max_size=32)


def proof_of(one: bytes, other: bytes, context: bytes = b"c") -> AgreementProof:
    private = X25519PrivateKey.from_private_bytes(one)
    return prove_agreement(private, public_bytes(other), context, random.Random(1).randbytes)


@settings(max_examples=25, deadline=None)
@given(one=KEYS, other=KEYS)
def test_proven_secret_equals_the_x25519_agreement(one: bytes, other: bytes) -> None:
    private = X25519PrivateKey.from_private_bytes(one)
    wanted = private.exchange(X25519PublicKey.from_public_bytes(public_bytes(other)))
    found = proven_agreement(proof_of(one, other), public_bytes(one), public_bytes(other), b"c")
    assert found == wanted


@given(seed=KEYS)
def test_multiples_of_the_base_point_equal_ed25519_public_keys(seed: bytes) -> None:
    """An Ed25519 public key is the base point times a number made from the seed, by RFC 8032."""
    digest = hashlib.sha512(seed).digest()[:32]
    number = int.from_bytes(digest, "little") & (2**254 - 8) | 2**254
    found = agreement_proof._compressed(agreement_proof._times_base(number))
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key()
    assert found == public.public_bytes_raw()


def of_two_points(proof: AgreementProof) -> bytes:
    """Return the proof's point plus the point of order two: (x, y) becomes (-x, -y). X25519 ignores
    this change."""
    number = int.from_bytes(proof.point, "little")
    y, sign = number % 2**255, number >> 255
    return ((P - y) | (1 - sign) << 255).to_bytes(32, "little")


def test_changed_agreement_proof_is_refused() -> None:
    one, other, third = (bytes([number]) * 32 for number in (1, 2, 3))
    proof = proof_of(one, other)
    mine, theirs, another = map(public_bytes, (one, other, third))
    assert proven_agreement(proof, mine, theirs, b"c")

    def refused(proof: AgreementProof, one: bytes, other: bytes, context: bytes) -> None:
        with pytest.raises(BrokenRuleError) as error:
            proven_agreement(proof, one, other, context)
        assert error.value.rule is Rule.EVIDENCE

    refused(proof, mine, theirs, b"d")
    refused(proof, theirs, mine, b"c")
    refused(proof, another, theirs, b"c")
    refused(proof, mine, another, b"c")
    order = agreement_proof._ORDER
    response = int.from_bytes(proof.response, "little") + order
    for changed in (
        AgreementProof(of_two_points(proof), proof.challenge, proof.response),
        AgreementProof(proof_of(one, third).point, proof.challenge, proof.response),
        AgreementProof(bytes(32), proof.challenge, proof.response),
        AgreementProof((1).to_bytes(32, "little"), proof.challenge, proof.response),
        AgreementProof((P + 3).to_bytes(32, "little"), proof.challenge, proof.response),
        AgreementProof(proof.point, bytes(32), proof.response),
        AgreementProof(proof.point, proof.challenge, bytes(32)),
        AgreementProof(proof.point, proof.challenge, response.to_bytes(32, "little")),
    ):
        refused(changed, mine, theirs, b"c")


@settings(max_examples=25, deadline=None)
@given(one=KEYS, other=KEYS, context=st.binary(max_size=40))
def test_only_the_owner_of_a_key_can_prove_to_know_it(
    one: bytes, other: bytes, context: bytes
) -> None:
    private = X25519PrivateKey.from_private_bytes(one)
    proof = prove_knowledge(private, context, random.Random(2).randbytes)
    check_knowledge(public_bytes(one), proof, context)
    half = int.from_bytes(proof[32:], "little")
    for key, changed, other_context in (
        (public_bytes(other), proof, context),
        (public_bytes(one), proof, context + b"!"),
        (public_bytes(one), bytes(64), context),
        (public_bytes(one), proof[:32] + (half ^ 1).to_bytes(32, "little"), context),
    ):
        if (key, changed, other_context) != (public_bytes(one), proof, context):
            with pytest.raises(BrokenRuleError) as refused:
                check_knowledge(key, changed, other_context)
            assert refused.value.rule is Rule.KEY


def test_public_keys_off_the_curve_are_refused() -> None:
    off = 0
    for number in range(2, 60):
        key = number.to_bytes(32, "little")
        square = (number**3 + 486662 * number**2 + number) % P
        on_curve = pow(square, (P - 1) // 2, P) == 1
        off += not on_curve
        with pytest.raises(BrokenRuleError) as refused:
            check_knowledge(key, bytes(64), b"c")
        assert refused.value.rule is Rule.KEY
        assert ("not a point of the curve" in refused.value.detail) is not on_curve
    assert off > 10
    with pytest.raises(BrokenRuleError):
        check_knowledge((P - 1).to_bytes(32, "little"), bytes(64), b"c")
