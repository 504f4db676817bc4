"""The certificates of the compose file: each party's own, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.repository import ROOT

from potluck.common.net.identity import Role
from potluck.common.net.tls import TlsFiles
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki.authority import IssuedFiles
from potluck.deploy.pki.compose_certificates import HOSTS, make_certificates

PARTIES = ["coordinator", "operator", *HOSTS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("authority", "grafana", *PARTIES):
        (tmp_path / name).mkdir()
    return tmp_path


def tls(folder: Path) -> TlsFiles:
    return TlsFiles(
        certificate=folder / "certificate.pem",
        key=folder / "key.pem",
        authority=folder / "authority.pem",
    )


def test_every_compose_party_gets_its_own_certificate_once(folder: Path) -> None:
    assert make_certificates(folder) == PARTIES
    roles = {party: tls(folder / party).load().identity.role for party in PARTIES}
    assert roles == {
        "coordinator": Role.COORDINATOR,
        "operator": Role.OPERATOR,
        **dict.fromkeys(HOSTS, Role.HOST),
    }
    for party in PARTIES:
        assert (folder / party / "key.pem").stat().st_mode & 0o077 == 0
        assert not (folder / "authority" / f"{party}.key").exists()
    password = folder / "grafana" / "admin-password"
    before = [(folder / party / "key.pem").read_bytes() for party in PARTIES]
    before.append(password.read_bytes())
    assert make_certificates(folder) == []
    (folder / "host-1" / "key.pem").unlink()  # as if killed before it was written
    assert make_certificates(folder) == ["host-1"]
    after = [(folder / party / "key.pem").read_bytes() for party in PARTIES]
    after.append(password.read_bytes())
    changed = [old != new for old, new in zip(before, after, strict=True)]
    assert changed == [party == "host-1" for party in PARTIES] + [False]
    assert tls(folder / "host-1").load().identity.may_speak_for("client-9")


def test_compose_certificate_is_made_again_if_its_key_could_not_be_copied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue = pki.issue

    def without_key(*arguments: Any, **options: Any) -> IssuedFiles:
        issued = issue(*arguments, **options)
        issued.key.unlink()
        return issued

    with monkeypatch.context() as patch:
        patch.setattr(pki, "issue", without_key)
        with pytest.raises(FileNotFoundError):
            make_certificates(folder)
    assert make_certificates(folder) == PARTIES
    assert tls(folder / "coordinator").load().identity.role is Role.COORDINATOR


def test_compose_file_has_the_certified_parties_and_clients() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    hosts = {
        name: service["environment"]["POTLUCK_CLIENT_CLIENTS"]
        for name, service in services.items()
        if name.startswith("host-")
    }
    assert hosts == HOSTS
    mounted = {volume.split(":")[1] for volume in services["pki"]["volumes"]}
    assert mounted == {f"/pki/{name}" for name in ("authority", "grafana", *PARTIES)}
