"""Keys of one session: agreement, derivation, commitments, and the channel between two clients.

X25519 (RFC 7748) → HKDF-SHA-256 (RFC 5869) → 32-byte keys, each for one use and one direction.
Clients are numbered by their place in the roster, from 1; the roster's digest is in every salt.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from potluck.secagg.protocol.primitives.sharing import SHARE_BYTES, from_bytes
from potluck.secagg.protocol.rules import BrokenRuleError, Rule

KEY_BYTES: Final = 32
_MASK_LABEL: Final = b"flsa/1 mask"
_SELF_LABEL: Final = b"flsa/1 self"
_SHARE_LABEL: Final = b"flsa/1 share"
_ANY_KEY: Final = X25519PrivateKey.from_private_bytes(bytes(KEY_BYTES))
_NONCE: Final = bytes(12)
"""The nonce of every message; a fixed one is sound, since each channel key encrypts one message."""


@dataclass(frozen=True)
class SessionKeys:
    """A client's secrets of one session; never stored, and dropped when the session ends.

    mask_key: X25519, agrees on pairwise masks. channel_key: X25519, encrypts shares in transit.
    seed: 32 bytes, seed of the client's own mask.
    """

    mask_key: X25519PrivateKey = field(repr=False)
    channel_key: X25519PrivateKey = field(repr=False)
    seed: bytes = field(repr=False)

    @classmethod
    def from_random(cls, entropy: bytes) -> SessionKeys:
        """Make the keys from 96 random bytes."""
        if len(entropy) != 3 * KEY_BYTES:
            raise ValueError(f"the keys of a session need 96 random bytes, not {len(entropy)}")
        mask, channel = (
            X25519PrivateKey.from_private_bytes(entropy[begin : begin + KEY_BYTES])
            for begin in (0, KEY_BYTES)
        )
        return cls(mask, channel, entropy[2 * KEY_BYTES :])


def commitment(seed: bytes, header_sha256: bytes) -> bytes:
    """Return the commitment to the seed of a client's own mask, for its advert."""
    return hashlib.sha256(b"b" + seed + header_sha256).digest()


def public_bytes(private: bytes) -> bytes:
    """Return the X25519 public key of 32 private bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """Return the shared secret. Raises BrokenRuleError (key) for a public key of low order."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise BrokenRuleError(Rule.KEY, "an X25519 public key has a low order") from None


def check_order(public: bytes) -> None:
    """Raise BrokenRuleError (key) for a public key of low order: its shared secrets are zero."""
    agree(_ANY_KEY, public)


def derive(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """Derive 32 bytes with HKDF-SHA-256."""
    return HKDF(hashes.SHA256(), KEY_BYTES, salt, info).derive(secret)


def pair_seed(secret: bytes, sharers_sha256: bytes, one: int, other: int, vector: str) -> bytes:
    """Return the seed of the mask between two clients on a vector. one, other: their numbers.

    The digest of the set of sharers is the salt, so different sets have unrelated masks.
    """
    low, high = sorted((one, other))
    return derive(secret, sharers_sha256, _info(_MASK_LABEL, low, high) + vector.encode())


def self_seed(seed: bytes, sharers_sha256: bytes, number: int, vector: str) -> bytes:
    """Return the seed of a client's own mask on a vector."""
    return derive(seed, sharers_sha256, _info(_SELF_LABEL, number, number) + vector.encode())


@dataclass(frozen=True)
class SharePair:
    """Shares of both secrets of one client, held by another.

    `take` returns only one of the two, since no party may ever learn both.
    """

    seed_share: bytes = field(repr=False)
    mask_key_share: bytes = field(repr=False)

    def take(self, *, survived: bool) -> bytes:
        """Return the share of the client's seed if the client survived, else the share of its mask
        key.
        """
        return self.seed_share if survived else self.mask_key_share

    def packed(self) -> bytes:
        """Return both shares as bytes, which only their holder may read."""
        return self.seed_share + self.mask_key_share


def seal_pair(
    pair: SharePair, secret: bytes, roster_sha256: bytes, sender: int, receiver: int
) -> bytes:
    """Return shares encrypted for their holder. secret: the secret that the channel keys agree
    on."""
    key, direction = _channel(secret, roster_sha256, sender, receiver)
    return ChaCha20Poly1305(key).encrypt(_NONCE, pair.packed(), roster_sha256 + direction)


def open_pair(
    ciphertext: bytes, secret: bytes, roster_sha256: bytes, sender: int, receiver: int
) -> SharePair:
    """Return the decrypted shares. Raises BrokenRuleError (share) if they were not encrypted with
    these arguments, or are not valid shares.
    """
    key, direction = _channel(secret, roster_sha256, sender, receiver)
    try:
        plain = ChaCha20Poly1305(key).decrypt(_NONCE, ciphertext, roster_sha256 + direction)
    except InvalidTag:
        raise BrokenRuleError(Rule.SHARE, "an encrypted share can't be decrypted") from None
    pair = SharePair(plain[:SHARE_BYTES], plain[SHARE_BYTES:])
    try:
        for share in (pair.seed_share, pair.mask_key_share):
            from_bytes(share)
    except ValueError as error:
        raise BrokenRuleError(Rule.SHARE, f"a decrypted share is not valid: {error}") from None
    return pair


def _channel(
    secret: bytes, roster_sha256: bytes, sender: int, receiver: int
) -> tuple[bytes, bytes]:
    direction = _info(b"", sender, receiver)
    return derive(secret, roster_sha256, _SHARE_LABEL + direction), direction


def _info(label: bytes, one: int, other: int) -> bytes:
    return label + one.to_bytes(8, "little") + other.to_bytes(8, "little")
