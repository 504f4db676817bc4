"""Two proofs about X25519 keys that disclose no private key: that one knows it, and what it agrees
on with another key.

The proof of knowledge is a signature of RFC 8032 with the key itself, as in Perrin's "The XEdDSA
and VXEdDSA Signature Schemes" (2016). A client could otherwise advertise a key that it has computed
from another client's, such as twice that key's point.

The proof of a shared secret discloses only the secret of one pair of keys, which the holder of the
other key knows already. With the private key itself, all shares that other clients encrypted for
its owner could be decrypted.

It is Chaum and Pedersen's ("Wallet databases with observers", CRYPTO 1992): two points have
the same logarithm, made non-interactive as in RFC 9381, on the curve of RFC 8032; RFC 7748 maps the
curve of X25519 onto it. X25519 ignores signs and small subgroups. So a public key is read as the
point with an even x, and the proof of a shared secret uses eight times the other key's point.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from potluck.secagg.protocol.primitives.sharing import Random
from potluck.secagg.protocol.rules import BrokenRuleError, Rule, require

_P: Final = 2**255 - 19
_ORDER: Final = 2**252 + 27742317777372353535851937790883648493
_D: Final = -121665 * pow(121666, -1, _P) % _P
_ROOT_OF_MINUS_ONE: Final = pow(2, (_P - 1) // 4, _P)
_COFACTOR: Final = 8
_NONCE_BYTES: Final = 64
_LABEL: Final = b"flsa/1 agreement"
_KNOWLEDGE_LABEL: Final = b"flsa/1 knowledge"

_Point = tuple[int, int, int, int]
"""A point in extended coordinates: X, Y, Z and T with x = X/Z, y = Y/Z and xy = T/Z."""

_ZERO: Final[_Point] = (0, 1, 1, 0)


@dataclass(frozen=True)
class AgreementProof:
    """The secret that two keys agree on, as a point of 32 bytes, with its proof: two numbers of 32
    bytes, little-endian."""

    point: bytes
    challenge: bytes
    response: bytes


def prove_knowledge(private: X25519PrivateKey, context: bytes, random: Random) -> bytes:
    """Prove that one knows a private key: a signature of 64 bytes over the context."""
    point, scalar = _key_pair(private)
    nonce = int.from_bytes(random(_NONCE_BYTES), "little") % _ORDER
    commitment = _compressed(_times_base(nonce))
    signed = commitment + _compressed(point) + _KNOWLEDGE_LABEL + context
    challenge = int.from_bytes(hashlib.sha512(signed).digest(), "little") % _ORDER
    return commitment + ((nonce + challenge * scalar) % _ORDER).to_bytes(32, "little")


def check_knowledge(public: bytes, proof: bytes, context: bytes) -> None:
    """Check a proof of knowledge of an X25519 public key's private key.

    Raises BrokenRuleError (key) for a wrong proof, and for a key that is not a point of the curve:
    X25519 works with such a key, but no proof about it is possible.
    """
    key = Ed25519PublicKey.from_public_bytes(_compressed(_lift(public)))
    try:
        key.verify(proof, _KNOWLEDGE_LABEL + context)
    except InvalidSignature:
        raise BrokenRuleError(
            Rule.KEY, "an X25519 public key has no proof that its owner knows the private key"
        ) from None


def prove_agreement(
    private: X25519PrivateKey, other: bytes, context: bytes, random: Random
) -> AgreementProof:
    """Prove the secret that a private key and another client's public key agree on.

    context: bytes that the proof is bound to.

    Raises BrokenRuleError (key) for a public key about which a proof is impossible.
    """
    own = private.public_key().public_bytes_raw()
    (_, scalar), base = _key_pair(private), _times(_COFACTOR, _lift(other))
    # Compute in the subgroup of prime order; X25519's clamped numbers give points in it anyway.
    agreed = _times(scalar * pow(_COFACTOR, -1, _ORDER), base)
    point = _compressed(agreed)
    nonce = int.from_bytes(random(_NONCE_BYTES), "little") % _ORDER
    challenge = _challenge(context, own, other, point, _times_base(nonce), _times(nonce, base))
    response = (nonce + challenge * scalar) % _ORDER
    return AgreementProof(point, challenge.to_bytes(32, "little"), response.to_bytes(32, "little"))


def proven_agreement(proof: AgreementProof, one: bytes, other: bytes, context: bytes) -> bytes:
    """Check a proof; return the X25519 shared secret (32 bytes) of two public keys.

    The holder of the key `one` made the proof. Raises BrokenRuleError (evidence) for a wrong proof.
    """
    mine, base = _lift(one), _times(_COFACTOR, _lift(other))
    agreed = _decompressed(proof.point)
    challenge, response = (
        int.from_bytes(each, "little") for each in (proof.challenge, proof.response)
    )
    require(
        challenge < _ORDER and response < _ORDER and _equal(_times(_ORDER, agreed), _ZERO),
        Rule.EVIDENCE,
        "a number in the proof of a shared secret is out of range",
    )
    first = _plus(_times_base(response), _minus(_times(challenge, mine)))
    second = _plus(_times(response, base), _minus(_times(challenge, _times(_COFACTOR, agreed))))
    holds = challenge == _challenge(context, one, other, proof.point, first, second)
    require(holds, Rule.EVIDENCE, "the proof of a shared secret is wrong")
    _, y, z, _ = agreed
    return ((z + y) * pow(z - y, -1, _P) % _P).to_bytes(32, "little")


def _challenge(
    context: bytes, one: bytes, other: bytes, point: bytes, first: _Point, second: _Point
) -> int:
    digest = hashlib.sha512(_LABEL + len(context).to_bytes(8, "little") + context)
    for each in (one, other, point, _compressed(first), _compressed(second)):
        digest.update(each)
    return int.from_bytes(digest.digest(), "little") % _ORDER


def _key_pair(private: X25519PrivateKey) -> tuple[_Point, int]:
    """Return the point with an even x of a key, and the point's logarithm in [0, `_ORDER`)."""
    point = _lift(private.public_key().public_bytes_raw())
    scalar = _clamped(private.private_bytes_raw()) % _ORDER
    return point, scalar if _equal(_times_base(scalar), point) else _ORDER - scalar


def _clamped(private: bytes) -> int:
    """Return the number that X25519 makes of a private key."""
    return int.from_bytes(private, "little") & (2**254 - 8) | 2**254


def _lift(public: bytes) -> _Point:
    """Return the point with an even x of an X25519 public key."""
    u = int.from_bytes(public, "little") % 2**255 % _P
    point = None if u == _P - 1 else _with_y((u - 1) * pow(u + 1, -1, _P) % _P, 0)
    if point is None:
        raise BrokenRuleError(Rule.KEY, "an X25519 public key is not a point of the curve")
    return point


def _with_y(y: int, sign: int) -> _Point | None:
    """Return the point with this y, by RFC 8032, section 5.1.3; None if it does not exist."""
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _ROOT_OF_MINUS_ONE % _P
    if (x * x - square) % _P or (x == 0 and sign):
        return None
    x = x if x & 1 == sign else _P - x if x else 0
    return (x, y, 1, x * y % _P)


def _decompressed(data: bytes) -> _Point:
    number = int.from_bytes(data, "little")
    y, sign = number % 2**255, number >> 255
    point = _with_y(y, sign) if y < _P else None
    # Refuse the point 0: keys of low order give this shared secret.
    if point is None or y == 1:
        raise BrokenRuleError(
            Rule.EVIDENCE, "the point in the proof of a shared secret is not on the curve"
        )
    return point


def _compressed(point: _Point) -> bytes:
    x, y, z, _ = point
    inverse = pow(z, -1, _P)
    x, y = x * inverse % _P, y * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _plus(one: _Point, other: _Point) -> _Point:
    """Add two points by RFC 8032, section 5.1.4; also correct for equal points and for zero."""
    a = (one[1] - one[0]) * (other[1] - other[0]) % _P
    b = (one[1] + one[0]) * (other[1] + other[0]) % _P
    c = 2 * one[3] * other[3] * _D % _P
    d = 2 * one[2] * other[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return (e * f % _P, g * h % _P, f * g % _P, e * h % _P)


def _minus(point: _Point) -> _Point:
    x, y, z, t = point
    return (-x % _P, y, z, -t % _P)


def _times(scalar: int, point: _Point) -> _Point:
    total = _ZERO
    while scalar:
        if scalar & 1:
            total = _plus(total, point)
        point = _plus(point, point)
        scalar >>= 1
    return total


def _times_base(scalar: int) -> _Point:
    """Return a multiple of the base point by 64 additions, whatever the scalar, in [0, 2^256)."""
    total = _ZERO
    for multiples in _multiples_of_base():
        total = _plus(total, multiples[scalar & 15])
        scalar >>= 4
    return total


@cache
def _multiples_of_base() -> Sequence[Sequence[_Point]]:
    """Return d · 16^i times the base point: by i < 64, then by d < 16."""
    rows, unit = list[Sequence[_Point]](), _BASE
    for _ in range(64):
        multiples = [_ZERO]
        for _ in range(15):
            multiples.append(_plus(multiples[-1], unit))
        rows.append(multiples)
        unit = _plus(multiples[-1], unit)
    return rows


def _equal(one: _Point, other: _Point) -> bool:
    crossed = one[0] * other[2] - other[0] * one[2], one[1] * other[2] - other[1] * one[2]
    return not any(each % _P for each in crossed)


_BASE: Final = _lift((9).to_bytes(32, "little"))
"""The base point of RFC 8032, which has an even x."""
