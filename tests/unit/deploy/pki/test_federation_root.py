"""The federation root as an operator makes it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from potluck.client.disclosure.member_keys import key_of
from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.net.membership import ENDS_SOON, Members, load_members
from potluck.deploy.commands.pki_commands import app
from potluck.deploy.pki.federation_root import (
    add_members,
    create_root,
    make_next_keys,
    renew_members,
    revoke_members,
    use_next_keys,
)


def test_signatures_of_members_added_by_the_root_are_accepted(tmp_path: Path) -> None:
    create_root(tmp_path, "demo")
    keys = add_members(tmp_path, ["client-0:1"], "host-0").keys
    add_members(tmp_path, ["client-2"], "host-1")
    renewed = [path.read_bytes() for path in keys]
    assert add_members(tmp_path, ["client-0:1"], "host-2").keys == keys  # new records, same keys
    assert [path.read_bytes() for path in keys] == renewed
    members = load_members(tmp_path / "members.json", tmp_path / "root.pub", federation="demo")
    for client in ("client-0", "client-1", "client-2"):
        signature = key_of(tmp_path / "members", client).sign(b"words")
        members.verify(client, b"words", signature, datetime.now(UTC))


def test_existing_root_is_replaced_only_with_force(tmp_path: Path) -> None:
    create_root(tmp_path, "demo")
    with pytest.raises(ConfigurationError, match="--force"):
        create_root(tmp_path, "demo")
    before = (tmp_path / "root.key").read_bytes()
    create_root(tmp_path, "demo", force=True)
    assert (tmp_path / "root.key").read_bytes() != before


@pytest.mark.parametrize(
    ("clients", "host"), [(["Client 1"], "h"), (["a", "a"], "h"), (["a"], "!")]
)
def test_invalid_member_or_federation_names_are_refused(
    tmp_path: Path, clients: list[str], host: str
) -> None:
    create_root(tmp_path, "demo")
    with pytest.raises(ConfigurationError):
        add_members(tmp_path, clients, host)
    with pytest.raises(ConfigurationError):
        create_root(tmp_path / "other", "No Name")


def test_root_and_member_keys_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    create_root(tmp_path, "demo")
    [key] = add_members(tmp_path, ["a"], "h").keys
    assert {path.stat().st_mode & 0o077 for path in (key, tmp_path / "root.key")} == {0}


def members_of(folder: Path) -> Members:
    return load_members(folder / "members.json", folder / "root.pub", federation="demo")


def test_each_membership_change_increases_the_epoch(tmp_path: Path) -> None:
    create_root(tmp_path, "demo")
    assert members_of(tmp_path).epoch == 1
    assert add_members(tmp_path, ["client-0:2"], "h").epoch == 2
    assert revoke_members(tmp_path, ["client-1"]).epoch == 3
    assert list(members_of(tmp_path).records) == ["client-0", "client-2"]


def test_member_record_longer_than_a_year_is_refused(tmp_path: Path) -> None:
    create_root(tmp_path, "demo")
    add_members(tmp_path, ["a"], "h")
    [record] = members_of(tmp_path).records.values()
    assert record.not_after - record.not_before < timedelta(days=366)
    for days in (0, 366, 3650):
        with pytest.raises(ConfigurationError, match="choose 1 to 365"):
            add_members(tmp_path, ["b"], "h", days=days)
    assert members_of(tmp_path).epoch == 2
    assert not (tmp_path / "members" / "b.key").exists()


def test_member_records_close_to_expiry_are_renewed(tmp_path: Path) -> None:
    create_root(tmp_path, "demo")
    add_members(tmp_path, ["a"], "h", days=20)
    add_members(tmp_path, ["b"], "h")
    before = members_of(tmp_path)
    document, renewed = renew_members(tmp_path, soon=ENDS_SOON)
    assert (document.epoch, renewed) == (before.epoch + 1, ["a"])
    after = members_of(tmp_path)
    assert after.records["b"] == before.records["b"]
    assert after.records["a"].public_key == before.records["a"].public_key
    assert after.records["a"].not_after > before.records["a"].not_after
    assert renew_members(tmp_path, soon=ENDS_SOON) == (document, [])


def test_member_keys_are_replaced_in_two_steps(tmp_path: Path) -> None:
    create_root(tmp_path, "demo")
    add_members(tmp_path, ["a"], "h")
    old = members_of(tmp_path).records["a"].public_key
    with pytest.raises(ConfigurationError, match="has no next key"):
        use_next_keys(tmp_path, ["a"])
    [made] = make_next_keys(tmp_path, ["a"])
    assert make_next_keys(tmp_path, ["a"]) == [made]
    assert members_of(tmp_path).records["a"].public_key == old
    text = made.read_bytes()
    use_next_keys(tmp_path, ["a"])
    assert members_of(tmp_path).records["a"].public_key != old
    assert (tmp_path / "members" / "a.key").read_bytes() == text
    assert not made.exists()


def test_revoked_member_key_is_never_accepted_again(tmp_path: Path) -> None:
    create_root(tmp_path, "demo")
    [key] = add_members(tmp_path, ["a"], "h").keys
    text, old = key.read_bytes(), members_of(tmp_path).records["a"].public_key
    revoke_members(tmp_path, ["a"])
    assert members_of(tmp_path).revoked == {("a", old)}
    with pytest.raises(ConfigurationError, match="client a is not a member"):
        revoke_members(tmp_path, ["a"])
    key.write_bytes(text)
    with pytest.raises(ConfigurationError, match="was revoked"):
        add_members(tmp_path, ["a"], "h")
    key.unlink()
    add_members(tmp_path, ["a"], "h")
    after = members_of(tmp_path)
    assert after.records["a"].public_key != old
    assert after.revoked == {("a", old)}


def test_root_does_not_sign_a_member_list_of_another_root(tmp_path: Path) -> None:
    create_root(tmp_path / "mine", "demo")
    create_root(tmp_path / "other", "demo")
    (tmp_path / "mine" / "members.json").write_bytes(
        (tmp_path / "other" / "members.json").read_bytes()
    )
    with pytest.raises(IdentityError, match="not signed by the federation root"):
        add_members(tmp_path / "mine", ["a"], "h")


def test_root_commands_create_renew_and_revoke_members(tmp_path: Path) -> None:
    root = str(tmp_path / "root")

    def said(*command: str) -> str:
        result = CliRunner().invoke(app, list(command), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    assert "potluck pki member" in said("root", root, "--federation", "demo")
    assert "now has membership epoch 2" in said("member", root, "client-0:2", "--host", "lab-a")
    assert "next/client-0.key" in said("rotate", root, "client-0")
    assert "now has membership epoch 3" in said("rotate", root, "client-0", "--switch")
    assert "potluck pki publish" in said("revoke-member", root, "client-1")
    assert "nothing to renew" in said("renew-members", root)
    assert "now has membership epoch 5" in said("renew-members", root, "client-2")
    listed = said("members", root)
    assert "membership epoch 5" in listed
    assert "revoked" in listed
