"""Member records and what members sign."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.net.membership import (
    MemberFile,
    MemberRecord,
    SignedRecord,
    load_members,
    profile_statement,
    statement,
)

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
ROOT = Ed25519PrivateKey.from_private_bytes(bytes(32))
MEMBER = Ed25519PrivateKey.from_private_bytes(bytes([1] * 32))


def record(**changes: Any) -> MemberRecord:
    values: dict[str, Any] = {
        "federation": "f",
        "client": "a",
        "host": "h",
        "public_key": MEMBER.public_key().public_bytes_raw().hex(),
        "not_before": NOW - timedelta(days=1),
        "not_after": NOW + timedelta(days=1),
    }
    return MemberRecord(**(values | changes))


def write(folder: Path, *members: SignedRecord) -> tuple[Path, Path]:
    file, root = folder / "members.json", folder / "root.pub"
    file.write_text(MemberFile(federation="f", members=members).model_dump_json())
    pem = ROOT.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    root.write_bytes(pem)
    return file, root


def profile(**changes: Any) -> bytes:
    values: dict[str, Any] = {
        "federation": "f",
        "client": "a",
        "data_epoch": 1,
        "signal": "label_counts",
        "parameters_json": "{}",
        "payload_json": "[]",
    }
    return profile_statement(**(values | changes))


def test_statements_have_a_documented_form() -> None:
    assert statement("x", ["é", ""]) == (
        bytes([0, 0, 0, 0, 0, 0, 0, 12])
        + b"potluck/v1/x"
        + bytes([0, 0, 0, 0, 0, 0, 0, 2])
        + "é".encode()
        + bytes(8)
    )


def test_no_two_lists_of_fields_share_their_bytes() -> None:
    assert statement("x", ["ab", "c"]) != statement("x", ["a", "bc"])
    assert statement("x", ["a"]) != statement("x", ["a", ""])
    assert statement("profile", ["a"]) != statement("member-record", ["a"])


def test_a_member_is_believed(tmp_path: Path) -> None:
    members = load_members(*write(tmp_path, SignedRecord.make(ROOT, record())), federation="f")
    members.verify("a", profile(), MEMBER.sign(profile()), NOW)


@pytest.mark.parametrize(
    "change",
    [
        {"federation": "g"},
        {"client": "b"},
        {"data_epoch": 2},
        {"signal": "triplet"},
        {"parameters_json": '{"epsilon":1}'},
        {"payload_json": "[1]"},
    ],
)
def test_a_signature_is_good_for_its_own_words_only(tmp_path: Path, change: Any) -> None:
    members = load_members(*write(tmp_path, SignedRecord.make(ROOT, record())), federation="f")
    with pytest.raises(IdentityError, match="another signature"):
        members.verify("a", profile(**change), MEMBER.sign(profile()), NOW)


def test_strangers_and_members_of_other_days_are_not_believed(tmp_path: Path) -> None:
    members = load_members(*write(tmp_path, SignedRecord.make(ROOT, record())), federation="f")
    signature = MEMBER.sign(profile())
    with pytest.raises(IdentityError, match="no member record"):
        members.verify("b", profile(), signature, NOW)
    with pytest.raises(IdentityError, match="valid from"):
        members.verify("a", profile(), signature, NOW + timedelta(days=2))
    with pytest.raises(IdentityError, match="no signature"):
        members.verify("a", profile(), b"", NOW)


def test_records_need_the_root_and_the_federation(tmp_path: Path) -> None:
    forged = SignedRecord.make(MEMBER, record())
    with pytest.raises(IdentityError, match="not signed by"):
        load_members(*write(tmp_path, forged), federation="f")
    changed = SignedRecord.make(ROOT, record()).model_copy(update={"record": record(host="other")})
    with pytest.raises(IdentityError, match="not signed by"):
        load_members(*write(tmp_path, changed), federation="f")
    with pytest.raises(IdentityError, match="this is 'g'"):
        load_members(*write(tmp_path, SignedRecord.make(ROOT, record())), federation="g")


def test_broken_files_are_named(tmp_path: Path) -> None:
    file, root = write(tmp_path)
    file.write_text("{")
    with pytest.raises(ConfigurationError, match=r"members\.json"):
        load_members(file, root, federation="f")
    root.write_text("not a key")
    with pytest.raises(ConfigurationError, match=r"root\.pub"):
        load_members(file, root, federation="f")
