"""Renewal and revocation of certificates, and errors on damaged certificate files."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pki import make_federation
from typer.testing import CliRunner

from potluck.client.cli import app as client_app
from potluck.common.errors import ConfigurationError, IdentityError, PotluckError
from potluck.common.net.identity import Identity, Role, exceeding, parse_claims, parse_identity
from potluck.common.net.key_files import (
    make_request,
    parse_request,
    read_request,
)
from potluck.common.net.revocation import Revocations, parse_revocations, read_revocations
from potluck.deploy.commands.pki_commands import app
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki.certificate_register import expires_in, find, grant, renew, revoke
from potluck.deploy.pki.certificate_register import sign as sign_grant
from potluck.deploy.pki.certificates import inspect, read_certificate

NOW = datetime(2030, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pki.create_authority(tmp_path / "pki", "test", now=NOW)
    pki.issue(tmp_path / "pki", Role.COORDINATOR, "coordinator", hosts=["localhost"], now=NOW)
    pki.issue(tmp_path / "pki", Role.HOST, "lab-a", clients=["client-0:5"], now=NOW)
    return tmp_path / "pki"


def host(name: str = "lab-b", federation: str = "test") -> Identity:
    claims = parse_claims(["client-6:9"])
    return Identity(federation=federation, role=Role.HOST, name=name, claims=claims)


def sign(
    folder: Path,
    request: Path,
    *,
    role: Role = Role.HOST,
    clients: Sequence[str] = (),
    force: bool = False,
    now: datetime | None = None,
) -> Path:
    return sign_grant(folder, grant(folder, request, role, clients), force=force, now=now)


def test_renewal_changes_only_serial_number_and_validity_period(folder: Path) -> None:
    before, key = inspect(folder / "coordinator.pem"), (folder / "coordinator.key").read_bytes()
    path, old = renew(folder, "coordinator", days=90, now=NOW + timedelta(days=300))
    after = inspect(path)
    assert (after.identity, after.hosts) == (before.identity, before.hosts)
    assert after.serial != before.serial == old.summary.serial
    assert after.not_after == NOW + timedelta(days=390)
    assert (folder / "coordinator.key").read_bytes() == key
    renew(folder, "coordinator", new_key=True, now=NOW + timedelta(days=301))
    assert (folder / "coordinator.key").read_bytes() != key
    assert (folder / "coordinator.key").stat().st_mode & 0o777 == 0o600
    assert len(find(folder, "coordinator")) == 3


def test_newer_of_two_certificates_issued_in_one_second_is_the_current_one(folder: Path) -> None:
    for _ in range(4):
        path, old = renew(folder, "lab-a", now=NOW)
        assert [one.summary.serial for one in revoke(folder, "lab-a", superseded=True)] == [
            old.summary.serial
        ]
        assert find(folder, "lab-a")[-1].summary.serial == inspect(path).serial


def test_certificate_states_follow_validity_and_revocation(folder: Path) -> None:
    [lab] = find(folder, "lab-a")
    times = {
        NOW - timedelta(days=1): "not yet valid",
        NOW: "valid",
        NOW + timedelta(days=340): "expires soon",
        NOW + timedelta(days=366): "expired",
    }
    assert {at: lab.state(at) for at in times} == times
    revoke(folder, "lab-a", now=NOW)
    assert find(folder, lab.summary.serial)[0].state(NOW) == "revoked"
    assert expires_in(folder, NOW) == {"coordinator": timedelta(days=365)}
    with pytest.raises(ConfigurationError, match="was revoked on 2030-05-01"):
        renew(folder, "lab-a")


def test_list_of_80_columns_shows_serial_numbers_that_revoke_accepts(folder: Path) -> None:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["list", str(folder)])
    [shown] = re.findall(r"^lab-a +host +client-0:5 +([0-9a-f]+) ", result.stdout, re.MULTILINE)
    [revoked] = revoke(folder, shown.upper(), now=NOW)
    assert revoked.identity.name == "lab-a"
    assert revoked.summary.serial.startswith(shown)


def test_list_as_json_has_complete_serial_numbers(folder: Path) -> None:
    result = CliRunner().invoke(app, ["list", str(folder), "--json"])
    assert [each["serial"] for each in json.loads(result.stdout)] == [
        find(folder, name)[0].summary.serial for name in ("coordinator", "lab-a")
    ]


def test_too_short_beginning_of_a_serial_number_is_refused(folder: Path) -> None:
    start = find(folder, "lab-a")[0].summary.serial[:7]
    with pytest.raises(ConfigurationError, match="no certificate with the name or serial number"):
        revoke(folder, start)


def test_revocation_list_number_increases_and_keeps_all_revocations(folder: Path) -> None:
    authority = folder / "authority.pem"
    assert read_revocations(folder / pki.REVOKED, authority).number == 0
    revoke(folder, "lab-a", now=NOW)
    renew(folder, "coordinator", now=NOW)
    revoke(folder, "coordinator", superseded=True, now=NOW + timedelta(days=1))
    found = read_revocations(folder / pki.REVOKED, authority)
    assert (found.number, len(found.revoked)) == (2, 2)
    assert revoke(folder, "lab-a") == []
    assert read_revocations(folder / pki.REVOKED, authority).number == 2
    with pytest.raises(ConfigurationError, match=r"issued names: coordinator, lab-a"):
        revoke(folder, "lab-z")


def test_older_revocation_list_does_not_readmit_a_revoked_certificate(folder: Path) -> None:
    authority = folder / "authority.pem"
    empty = read_revocations(folder / pki.REVOKED, authority)
    [lab] = revoke(folder, "lab-a", now=NOW)
    serial = int(lab.summary.serial, 16)
    revocations = Revocations()
    revocations.check(serial, "host 'lab-a'")
    assert revocations.add(read_revocations(folder / pki.REVOKED, authority)) == {serial}
    assert revocations.add(empty) == frozenset()
    with pytest.raises(IdentityError, match=r"host 'lab-a' \(serial [0-9a-f]+\) was revoked on"):
        revocations.check(serial, "host 'lab-a'")


def test_revocation_list_of_another_authority_is_refused(folder: Path, tmp_path: Path) -> None:
    pki.create_authority(tmp_path / "other", "test")
    with pytest.raises(IdentityError, match="not signed by this federation's authority"):
        read_revocations(tmp_path / "other" / pki.REVOKED, folder / "authority.pem")


def test_signing_a_request_never_needs_the_private_key(folder: Path, tmp_path: Path) -> None:
    key, request, fingerprint = make_request(tmp_path / "host", host())
    assert key.stat().st_mode & 0o777 == 0o600
    assert make_request(tmp_path / "host", host())[2] == fingerprint  # the key is kept
    path = sign(folder, request, clients=["client-6:9"], now=NOW)
    assert inspect(path).identity == host()
    assert not (folder / "lab-b.key").exists()
    renewed, _ = renew(folder, "lab-b", now=NOW + timedelta(days=1))
    assert path == renewed
    assert read_certificate(path).public_key() == read_request(request).public_key


def test_signed_request_gets_only_the_clients_the_operator_grants(
    folder: Path, tmp_path: Path
) -> None:
    _, request, _ = make_request(tmp_path / "host", host())
    asks = "is for the clients client-6:9, but the certificate would have "
    with pytest.raises(ConfigurationError, match=f"{asks}no client; name all"):
        sign(folder, request, now=NOW)
    with pytest.raises(ConfigurationError, match=f"{asks}client-6, client-7:8; "):
        sign(folder, request, clients=["client-6", "client-7:8"], now=NOW)
    assert not (folder / "lab-b.pem").exists()
    path = sign(folder, request, clients=["client-6,client-7:10"], now=NOW)
    identity = inspect(path).identity
    assert identity is not None
    assert [str(claim) for claim in identity.claims] == ["client-6", "client-7:10"]
    with pytest.raises(ConfigurationError, match="already exists; add --force"):
        sign(folder, request, now=NOW)
    sign(folder, request, force=True, now=NOW)  # sign it again, with the same clients
    assert inspect(path).identity == identity
    revoke(folder, "lab-b", now=NOW)
    with pytest.raises(ConfigurationError, match=f"{asks}no client"):
        sign(folder, request, force=True, now=NOW)
    _, foreign, _ = make_request(tmp_path / "host", host("lab-c", federation="elsewhere"))
    with pytest.raises(ConfigurationError, match="is for federation elsewhere"):
        sign(folder, foreign, clients=["client-6:9"])


def test_request_for_a_role_other_than_the_granted_one_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    wolf = Identity(federation="test", role=Role.OPERATOR, name="lab-b")
    _, request, _ = make_request(tmp_path / "host", wolf)
    with pytest.raises(ConfigurationError, match="is for the role operator, not host; to sign"):
        sign(folder, request, clients=["client-6:9"], now=NOW)
    refused = CliRunner().invoke(app, ["sign", str(folder), str(request), "--yes"])
    assert refused.exit_code == 1
    assert not (folder / "lab-b.pem").exists()
    assert inspect(sign(folder, request, role=Role.OPERATOR, now=NOW)).identity == wolf
    _, lab_a, _ = make_request(tmp_path / "host", host("lab-a"))
    with pytest.raises(
        ConfigurationError, match=r"client-6:9, but the certificate would have client-0:5; "
    ):
        sign(folder, lab_a, force=True, now=NOW)


@pytest.mark.parametrize(
    ("asked", "granted", "more"),
    [
        ("client-3:5", "client-0:4,client-5", ""),
        ("client-3:5", "client-0:4", "client-3:5"),
        ("silo-08:11", "silo-00:10,silo-11", ""),
        ("silo-8:11", "silo-00:20", "silo-8:11"),
        ("a,b", "a", "b"),
        ("x0:99999999999", "x0:99999999999", ""),
        ("x0:99999999999", "x0:199999999999", "x0:99999999999"),
    ],
)
def test_client_claims_exceeding_a_grant_are_computed(asked: str, granted: str, more: str) -> None:
    found = exceeding(parse_claims([asked]), parse_claims([granted]))
    assert ",".join(map(str, found)) == more


def test_reserved_certificate_names_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="'revoked' is reserved for the authority"):
        pki.issue(folder, Role.HOST, "revoked", clients=["a"])


def test_commands_enroll_sign_renew_and_revoke_a_host(tmp_path: Path) -> None:
    run = CliRunner().invoke
    make_federation(tmp_path / "pki")
    here, there = str(tmp_path / "pki"), str(tmp_path / "host")
    asked = run(
        client_app,
        ["enroll", there, "--name", "lab-b", "--federation", "test", "--clients", "client-6:9"],
    )
    assert asked.exit_code == 0, asked.output
    request = f"{there}/lab-b.csr"
    sign_it = ["sign", here, request, "--clients", "client-6:9"]
    refused = run(app, sign_it, input="n\n")
    assert refused.exit_code == 1
    assert run(app, ["sign", here, request, "--yes"]).exit_code == 1
    assert not (tmp_path / "pki" / "lab-b.pem").exists()
    signed = run(app, sign_it, input="y\n")
    assert signed.exit_code == 0
    [shown] = {line for line in asked.output.splitlines() if line.startswith("fingerprint")}
    assert shown in signed.output
    assert run(app, ["renew", here, "lab-b"]).exit_code == 0
    assert "nothing to renew" in run(app, ["renew", here]).output
    assert "potluck pki push" in run(app, ["revoke", here, "lab-b"]).output
    listed = json.loads(run(app, ["list", here, "--json"]).output)
    assert [one["state"] for one in listed if one["name"] == "lab-b"] == ["revoked"] * 2
    assert "revoked" in run(app, ["list", here]).output


# --- Whatever a file holds, reading it ends in one clear error ------------------------------------

DAMAGE = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda kind, body: (
            f"-----BEGIN {kind}-----\n".encode()
            + base64.encodebytes(body)
            + f"-----END {kind}-----\n".encode()
        ),
        st.sampled_from(["CERTIFICATE", "X509 CRL", "CERTIFICATE REQUEST", "PRIVATE KEY"]),
        st.binary(max_size=200),
    ),
)


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("genuine")
    pki.create_authority(folder, "test")
    pki.issue(folder, Role.HOST, "lab-a", clients=["a"])
    revoke(folder, "lab-a")
    _, request, _ = make_request(folder, host())
    return {
        "authority": (folder / "authority.pem").read_bytes(),
        "list": (folder / pki.REVOKED).read_bytes(),
        "request": request.read_bytes(),
    }


def damaged(pem: bytes, data: st.DataObject) -> bytes:
    """Return other bytes, or the PEM text with some bytes of its content changed."""
    if data.draw(st.booleans()):
        return data.draw(DAMAGE)
    head, *lines, tail = pem.splitlines()
    body = bytearray(base64.b64decode(b"".join(lines)))
    for place in data.draw(st.sets(st.integers(0, len(body) - 1), min_size=1, max_size=3)):
        body[place] ^= data.draw(st.integers(1, 255))
    return b"\n".join([head, base64.b64encode(bytes(body)), tail])


@settings(deadline=None)
@given(data=st.data())
def test_damaged_revocation_list_is_refused_in_one_line(
    genuine: dict[str, bytes], data: st.DataObject
) -> None:
    pem, message = damaged(genuine["list"], data), None
    try:
        parse_revocations(pem, genuine["authority"], source="the list")
    except PotluckError as error:
        message = error.message
    if message is not None:
        assert message.startswith("the list")
        assert "\n" not in message
    else:  # nothing signs the count of the signature's unused bits, which may have changed
        signed = x509.load_pem_x509_crl(genuine["list"]).tbs_certlist_bytes
        assert x509.load_pem_x509_crl(pem).tbs_certlist_bytes == signed


@settings(deadline=None)
@given(data=st.data())
def test_damaged_certificate_request_is_refused(
    genuine: dict[str, bytes], data: st.DataObject
) -> None:
    pem = damaged(genuine["request"], data)
    try:
        parse_request(pem)
    except (ValueError, IdentityError):
        return
    signed = x509.load_pem_x509_csr(genuine["request"]).tbs_certrequest_bytes
    assert x509.load_pem_x509_csr(pem).tbs_certrequest_bytes == signed  # as for the list


@settings(deadline=None)
@given(text=st.text(max_size=200))
def test_any_text_is_parsed_to_an_identity_with_that_uri_or_refused(text: str) -> None:
    for uri in (text, f"potluck://test/host/{text}", f"potluck://test/host/h?clients={text}"):
        with contextlib.suppress(IdentityError):  # no other error is allowed
            assert parse_identity(uri).uri() == uri


def test_revocation_list_is_read_by_a_standard_x509_parser(genuine: dict[str, bytes]) -> None:
    found = x509.load_pem_x509_crl(genuine["list"])
    authority = x509.load_pem_x509_certificate(genuine["authority"])
    assert found.issuer == authority.subject
    assert len(list(found)) == 1


def test_last_issued_certificate_is_known_without_file_times(tmp_path: Path) -> None:
    pki.create_authority(tmp_path, "demo", now=NOW)
    for name in [f"operator-{number}" for number in range(8)]:
        pki.issue(tmp_path, Role.OPERATOR, name, now=NOW)
        last = pki.issue(tmp_path, Role.OPERATOR, name, now=NOW, force=True)
        for path in tmp_path.rglob("*.pem"):
            os.utime(path, (0, 0))
        assert find(tmp_path, name)[-1].summary.serial == inspect(last.certificate).serial
