"""Findings of `potluck doctor` about a party's membership."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.pki import make_federation

from potluck.client.config import ClientConfig
from potluck.deploy.doctor.diagnosis import Finding, Verdict
from potluck.deploy.doctor.party_checks import coordinator_membership, host_membership
from potluck.deploy.pki.federation_root import (
    add_members,
    create_root,
    make_next_keys,
    revoke_members,
    use_next_keys,
)
from potluck.server.config import CoordinatorConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make the root of a federation with clients a and b on host-0."""
    make_federation(tmp_path / "pki", {"host-0": ["a", "b"]})
    root = tmp_path / "root"
    create_root(root, "test")
    add_members(root, ["a", "b"], "host-0")
    return tmp_path


def configured(folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    root = folder / "root"
    tls = {
        "certificate": folder / "pki" / f"{kind}.pem",
        "key": folder / "pki" / f"{kind}.key",
        "authority": folder / "pki" / "authority.pem",
    }
    return {
        "state_directory": folder / kind,
        "federation_root": root / "root.pub",
        "members": root / "members.json",
        "tls": tls,
    } | changes


def of_host(folder: Path, now: datetime | None = None, **changes: Any) -> list[Finding]:
    values = {"coordinator": "h:1", "clients": ("a", "b"), "member_key": folder / "root/members"}
    config = ClientConfig.model_validate(configured(folder, "host-0", **(values | changes)))
    return list(host_membership(config, now or datetime.now(UTC)))


def test_valid_member_records_are_ok(folder: Path) -> None:
    config = CoordinatorConfig.model_validate(configured(folder, "coordinator"))
    for [found] in (list(coordinator_membership(config, datetime.now(UTC))), of_host(folder)):
        assert (found.verdict, found.found) == (Verdict.OK, "epoch 2 with 2 members")
    later = datetime.now(UTC) + timedelta(days=340)
    for [found] in (list(coordinator_membership(config, later)), of_host(folder, later)):
        assert found.verdict is Verdict.WARNING
        assert "the member record of client 'a' ends on" in found.found
        assert "potluck pki renew-members" in found.remedy


def test_client_without_a_member_record_is_a_warning(folder: Path) -> None:
    revoke_members(folder / "root", ["b"])
    [found] = of_host(folder)
    assert found.verdict is Verdict.WARNING
    assert "client 'b' has no record in membership epoch 3" in found.found


def test_host_without_the_member_key_in_force_is_an_error(folder: Path) -> None:
    keys = folder / "root" / "members"
    old = (keys / "a.key").read_bytes()
    make_next_keys(folder / "root", ["a"])
    use_next_keys(folder / "root", ["a"])
    (keys / "a.key").write_bytes(old)
    [found] = of_host(folder)
    assert found.verdict is Verdict.ERROR
    assert "is the key that the member record of client 'a' names" in found.found


def test_unusable_membership_files_are_named(folder: Path) -> None:
    [found] = of_host(folder, members=None)
    assert (found.verdict, found.found) == (
        Verdict.WARNING,
        "this host has not received a membership yet",
    )
    [found] = of_host(folder, members=folder / "nowhere.json")
    assert found.verdict is Verdict.ERROR
    assert "nowhere.json can't be read" in found.found
    create_root(folder / "other", "test")
    [found] = of_host(folder, members=folder / "other" / "members.json")
    assert found.verdict is Verdict.ERROR
    assert "not signed by the federation root" in found.found
    assert of_host(folder, federation_root=None) == []
