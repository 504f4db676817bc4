"""Small memberships, signed by a root that tests hold."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from potluck.common.net.membership import (
    MemberRecord,
    MembershipDocument,
    SignedMembership,
    public_text,
)

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
ROOT = Ed25519PrivateKey.from_private_bytes(bytes(32))
MEMBER = Ed25519PrivateKey.from_private_bytes(bytes([1] * 32))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes([2] * 32))


def record(**changes: Any) -> MemberRecord:
    """Return the record of client `a` on host `h`, with the key MEMBER."""
    values: dict[str, Any] = {
        "client": "a",
        "host": "h",
        "public_key": public_text(MEMBER),
        "not_before": NOW - timedelta(days=1),
        "not_after": NOW + timedelta(days=1),
    }
    return MemberRecord(**(values | changes))


def document(*members: MemberRecord, **changes: Any) -> MembershipDocument:
    """Return the document of epoch 3 of federation `f`."""
    values: dict[str, Any] = {"federation": "f", "epoch": 3, "members": members}
    return MembershipDocument(**(values | changes))


def signed(*members: MemberRecord, root: Ed25519PrivateKey = ROOT, **changes: Any) -> bytes:
    """Return the text of a members.json, signed by `root`."""
    return SignedMembership.make(root, document(*members, **changes)).to_bytes()


def write_root(folder: Path) -> Path:
    """Write the public key of ROOT as root.pub; return its path."""
    path = folder / "root.pub"
    pem = ROOT.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    path.write_bytes(pem)
    return path


def ten_years(**changes: Any) -> bytes:
    """Return a signed document with a record that is valid for ten years."""
    long = record(**changes)
    long = long.model_copy(update={"not_after": long.not_before + timedelta(days=3650)})
    made = MembershipDocument.model_construct(federation="f", epoch=9, members=(long,), revoked=())
    return SignedMembership.model_construct(
        document=made, signature=ROOT.sign(made.statement()).hex()
    ).to_bytes()
