"""The document of a federation's members, and what members sign."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.memberships import (
    MEMBER,
    NOW,
    OTHER,
    ROOT,
    document,
    record,
    signed,
    ten_years,
    write_root,
)

from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.net.membership import (
    MAXIMUM_BYTES,
    Revocation,
    load_members,
    profile_statement,
    public_text,
    statement,
    troubles_of,
    verified_members,
)


def write(folder: Path, text: bytes) -> tuple[Path, Path]:
    file = folder / "members.json"
    file.write_bytes(text)
    return file, write_root(folder)


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


def refusal(text: bytes) -> str:
    """Return the error with which a document is refused."""
    with pytest.raises((ConfigurationError, IdentityError)) as caught:
        verified_members(text, ROOT.public_key(), federation="f", source="here")
    return caught.value.message


def test_signed_statement_has_the_documented_bytes() -> None:
    assert statement("x", ["é", ""]) == (
        bytes([0, 0, 0, 0, 0, 0, 0, 12])
        + b"potluck/v1/x"
        + bytes([0, 0, 0, 0, 0, 0, 0, 2])
        + "é".encode()
        + bytes(8)
    )


def test_different_field_lists_give_different_statement_bytes() -> None:
    assert statement("x", ["ab", "c"]) != statement("x", ["a", "bc"])
    assert statement("x", ["a"]) != statement("x", ["a", ""])
    assert statement("profile", ["a"]) != statement("membership", ["a"])


def test_signature_of_a_member_is_accepted(tmp_path: Path) -> None:
    members = load_members(*write(tmp_path, signed(record())), federation="f")
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
def test_signature_over_different_content_is_rejected(tmp_path: Path, change: Any) -> None:
    members = load_members(*write(tmp_path, signed(record())), federation="f")
    with pytest.raises(IdentityError, match="not from its member key"):
        members.verify("a", profile(**change), MEMBER.sign(profile()), NOW)


def test_signatures_of_non_members_and_expired_members_are_rejected(tmp_path: Path) -> None:
    members = load_members(*write(tmp_path, signed(record())), federation="f")
    signature = MEMBER.sign(profile())
    with pytest.raises(IdentityError, match="no record in membership epoch 3"):
        members.verify("b", profile(), signature, NOW)
    with pytest.raises(IdentityError, match="valid from"):
        members.verify("a", profile(), signature, NOW + timedelta(days=2))
    with pytest.raises(IdentityError, match="no signature"):
        members.verify("a", profile(), b"", NOW)


def test_member_list_of_another_root_or_federation_is_rejected() -> None:
    assert "not signed by the federation root" in refusal(signed(record(), root=MEMBER))
    assert "not of 'f'" in refusal(signed(record(), federation="g"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("epoch",), 4),
        (("federation",), "g"),
        (("members", 0, "host"), "elsewhere"),
        (("members", 0, "public_key"), public_text(OTHER)),
        (("members", 0, "not_after"), "2026-06-01T00:00:00Z"),
        (("members",), []),
        (("revoked",), []),
    ],
)
def test_member_list_changed_after_signing_is_rejected(path: Any, value: Any) -> None:
    gone = Revocation(client="b", public_key=public_text(OTHER), epoch=2)
    parsed = json.loads(signed(record(), revoked=(gone,)))
    place = parsed["document"]
    for step in path[:-1]:
        place = place[step]
    assert place[path[-1]] != value
    place[path[-1]] = value
    assert "not signed by the federation root" in refusal(json.dumps(parsed).encode())


def test_whitespace_changes_neither_signature_nor_digest_of_a_member_list() -> None:
    text = signed(record())
    key = ROOT.public_key()
    one = verified_members(text, key, federation="f", source="")
    two = verified_members(json.dumps(json.loads(text)).encode(), key, federation="f", source="")
    assert one.digest == two.digest
    assert (
        one.digest
        != verified_members(signed(record(), epoch=4), key, federation="f", source="").digest
    )


def test_member_record_valid_for_more_than_366_days_is_refused() -> None:
    record(not_after=NOW + timedelta(days=365))
    for days in (366, 3650, -1):
        with pytest.raises(ValidationError, match="at most 366 days"):
            record(not_after=NOW + timedelta(days=days))
    assert "renew it with `potluck pki member`" in refusal(ten_years())


def test_member_list_that_contradicts_itself_is_refused() -> None:
    revoked = Revocation(client="a", public_key=public_text(MEMBER), epoch=2)
    with pytest.raises(ValidationError, match="has a revoked key"):
        document(record(), revoked=(revoked,))
    document(record(public_key=public_text(OTHER)), revoked=(revoked,))
    with pytest.raises(ValidationError, match="two records"):
        document(record(), record(host="other"))
    with pytest.raises(ValidationError, match="not sorted"):
        document(record(client="b"), record(client="a"))
    with pytest.raises(ValidationError, match="later epoch"):
        document(revoked=(revoked.model_copy(update={"epoch": 4}),))


def test_member_records_close_to_expiry_give_a_warning() -> None:
    members = verified_members(signed(record()), ROOT.public_key(), federation="f", source="")
    [line] = troubles_of(members, ["a"], NOW)
    assert "ends on 2026-05-05" in line
    [line] = troubles_of(members, ["b"], NOW)
    assert "no record" in line
    long = signed(record(not_after=NOW + timedelta(days=300)))
    members = verified_members(long, ROOT.public_key(), federation="f", source="")
    assert troubles_of(members, ["a"], NOW) == []


def test_damaged_membership_file_is_named_in_the_error(tmp_path: Path) -> None:
    file, root = write(tmp_path, b"{")
    with pytest.raises(ConfigurationError, match=r"members\.json"):
        load_members(file, root, federation="f")
    file.write_bytes(bytes(MAXIMUM_BYTES + 1))
    with pytest.raises(ConfigurationError, match="a member list may have at most"):
        load_members(file, root, federation="f")
    root.write_text("not a key")
    with pytest.raises(ConfigurationError, match=r"root\.pub"):
        load_members(file, root, federation="f")


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_arbitrary_bytes_as_a_member_list_are_refused_with_a_message(data: bytes) -> None:
    assert refusal(data).startswith("here: ")
