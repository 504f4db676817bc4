"""The federation root as an operator makes it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from potluck.client.disclosure.member_keys import key_of
from potluck.common.errors import ConfigurationError
from potluck.common.net.membership import load_members
from potluck.deploy.pki.federation_root import add_members, create_root


def test_members_it_makes_are_believed(tmp_path: Path) -> None:
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


def test_a_root_is_not_replaced_by_mistake(tmp_path: Path) -> None:
    create_root(tmp_path, "demo")
    with pytest.raises(ConfigurationError, match="--force"):
        create_root(tmp_path, "demo")
    before = (tmp_path / "root.key").read_bytes()
    create_root(tmp_path, "demo", force=True)
    assert (tmp_path / "root.key").read_bytes() != before


@pytest.mark.parametrize(
    ("clients", "host"), [(["Client 1"], "h"), (["a", "a"], "h"), (["a"], "!")]
)
def test_bad_names_are_refused(tmp_path: Path, clients: list[str], host: str) -> None:
    create_root(tmp_path, "demo")
    with pytest.raises(ConfigurationError):
        add_members(tmp_path, clients, host)
    with pytest.raises(ConfigurationError):
        create_root(tmp_path / "other", "No Name")


def test_secrets_are_the_owners_alone(tmp_path: Path) -> None:
    create_root(tmp_path, "demo")
    [key] = add_members(tmp_path, ["a"], "h").keys
    assert {path.stat().st_mode & 0o077 for path in (key, tmp_path / "root.key")} == {0}
