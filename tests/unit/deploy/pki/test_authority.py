from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.pki import TestFederation, make_federation, server_credentials, tls_files
from typer.testing import CliRunner

from potluck.common.errors import ConfigurationError, IdentityError, PotluckError, StorageError
from potluck.common.net.identity import (
    Identity,
    Role,
    credential_from_pem,
    parse_claims,
    peer_credential,
)
from potluck.common.net.tls import TlsFiles, channel_credentials
from potluck.deploy.commands.pki_commands import app
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki.certificates import inspect

NOW = datetime(2030, 5, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> TestFederation:
    return make_federation(tmp_path_factory.mktemp("pki"), {"host-0": ["client-0:5", "a"]})


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def with_files(files: TlsFiles, **changed: Path) -> TlsFiles:
    return files.model_copy(update=changed)


def test_certificates_pass_an_independent_tls_verifier(federation: TestFederation) -> None:
    authority = certificate(federation.coordinator.authority)
    verifier = PolicyBuilder().store(Store([authority])).time(datetime.now(UTC))
    # cryptography's own verifier applies the CA/Browser rules to names, extensions and signatures.
    verifier.build_server_verifier(x509.DNSName("localhost")).verify(
        certificate(federation.coordinator.certificate), []
    )
    verifier.build_client_verifier().verify(certificate(federation.operator.certificate), [])
    usages = {
        federation.coordinator.certificate: ExtendedKeyUsageOID.SERVER_AUTH,
        federation.operator.certificate: ExtendedKeyUsageOID.CLIENT_AUTH,
        federation.hosts["host-0"].certificate: ExtendedKeyUsageOID.CLIENT_AUTH,
    }
    for path, usage in usages.items():
        extensions = certificate(path).extensions
        assert list(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [usage]
        assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        key = certificate(path).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert isinstance(key.curve, ec.SECP256R1)


def test_key_files_and_their_folder_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "pki"
    make_federation(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    modes = {path.name: path.stat().st_mode & 0o777 for path in files}
    assert (folder / "issued").stat().st_mode & 0o777 == 0o700
    assert {modes[name] for name in modes if name.endswith(".key")} == {0o600}
    assert {modes[name] for name in modes if name.endswith(".pem")} == {0o644}
    # Includes the register and the revocation list, and no temporary file.
    assert len(modes) == 8 + 4


def test_certificate_validity_is_backdated_and_ends_with_the_authority(tmp_path: Path) -> None:
    pki.create_authority(tmp_path, "f", days=100, now=NOW)
    pki.issue(tmp_path, Role.OPERATOR, "short", days=7, now=NOW)
    pki.issue(tmp_path, Role.OPERATOR, "long", now=NOW)
    short, long = (inspect(tmp_path / f"{name}.pem") for name in ("short", "long"))
    assert (short.not_before, short.not_after) == (NOW - pki.BACKDATED, NOW + timedelta(days=7))
    assert long.not_after == NOW + timedelta(days=100)
    with pytest.raises(ConfigurationError, match="expired on 2030-08-09"):
        pki.issue(tmp_path, Role.OPERATOR, "late", now=NOW + timedelta(days=101))
    assert not (tmp_path / "late.key").exists()


def test_existing_authority_or_certificate_is_replaced_only_with_force(tmp_path: Path) -> None:
    make_federation(tmp_path, {})
    before = (tmp_path / "operator.pem").read_bytes()
    with pytest.raises(ConfigurationError, match=r"authority\.pem already exists; add --force"):
        pki.create_authority(tmp_path, "f")
    with pytest.raises(ConfigurationError, match=r"operator\.pem already exists; add --force"):
        pki.issue(tmp_path, Role.OPERATOR, "operator")
    assert (tmp_path / "operator.pem").read_bytes() == before
    pki.issue(tmp_path, Role.OPERATOR, "operator", force=True)
    assert (tmp_path / "operator.pem").read_bytes() != before


@pytest.mark.parametrize(
    ("role", "name", "options", "message"),
    [
        (Role.COORDINATOR, "c", {}, "add --host"),
        (Role.COORDINATOR, "c", {"hosts": ["localhost:7443"]}, "neither a host name nor an IP"),
        (Role.COORDINATOR, "c", {"hosts": ["-x"]}, "neither a host name nor an IP"),
        (
            Role.COORDINATOR,
            "c",
            {"hosts": ["localhost"], "clients": ["a"]},
            "which only hosts and relays may have",
        ),
        (Role.HOST, "h", {}, "add --clients"),
        (Role.HOST, "h", {"clients": ["a"], "hosts": ["localhost"]}, "no party connects to a host"),
        (Role.HOST, "h", {"clients": ["A"]}, "'A' is neither a client id"),
        (Role.HOST, "h", {"clients": [f"x{i}y" for i in range(2000)]}, "give a range"),
        (Role.HOST, "authority", {"clients": ["a"]}, "reserved for the authority"),
        (Role.OPERATOR, "../o", {}, "operator name '../o' is not allowed"),
        (Role.OPERATOR, "o", {"days": 0}, "1 to 36500 days, not 0"),
        (Role.OPERATOR, "o", {"days": 10**9}, "36500 days, not 1000000000"),
    ],
)
def test_refused_certificate_request_writes_no_files(
    tmp_path: Path, role: Role, name: str, options: Mapping[str, list[str]], message: str
) -> None:
    pki.create_authority(tmp_path, "f")
    with pytest.raises(PotluckError, match=message):
        pki.issue(tmp_path, role, name, **options)  # type: ignore[arg-type]  # wrong on purpose
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"authority.pem", "authority.key", "revoked.pem"}


def test_missing_or_damaged_authority_can_not_issue_certificates(
    tmp_path: Path, federation: TestFederation
) -> None:
    with pytest.raises(ConfigurationError, match="potluck pki init"):
        pki.issue(tmp_path, Role.OPERATOR, "o")
    with pytest.raises(ConfigurationError, match="federation name 'F' is not allowed"):
        pki.create_authority(tmp_path, "F")
    own, key = tmp_path / "authority.pem", tmp_path / "authority.key"
    own.write_bytes(federation.operator.certificate.read_bytes())
    with pytest.raises(ConfigurationError, match="is not the certificate of an authority"):
        pki.issue(tmp_path, Role.OPERATOR, "o")
    own.write_bytes(federation.operator.authority.read_bytes())
    with pytest.raises(ConfigurationError, match="can't read the authority"):
        pki.issue(tmp_path, Role.OPERATOR, "o")
    key.write_bytes(federation.operator.key.read_bytes())
    with pytest.raises(ConfigurationError, match="does not belong to the certificate"):
        pki.issue(tmp_path, Role.OPERATOR, "o")
    own.write_text("no certificate")
    with pytest.raises(ConfigurationError, match="is not a certificate in PEM form"):
        pki.issue(tmp_path, Role.OPERATOR, "o")


def test_unwritable_pki_folder_raises_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="can't be written"):
        pki.create_authority(tmp_path / "file" / "pki", "f")


def test_loaded_tls_files_contain_the_identity_and_the_key(federation: TestFederation) -> None:
    files = federation.hosts["host-0"]
    material = files.load(Role.HOST)
    assert material.identity.uri() == "potluck://test/host/host-0?clients=client-0:5,a"
    assert material.key == files.key.read_bytes()
    assert material.expires == inspect(files.certificate).not_after
    assert "PRIVATE" not in repr(material)


def test_peer_credential_is_read_from_the_grpc_context(federation: TestFederation) -> None:
    pem = federation.operator.certificate.read_bytes()
    newest = {"ssl_tls_version": [b"TLSv1.3"]}
    assert peer_credential({"x509_pem_cert": [pem], **newest}).identity.role is Role.OPERATOR
    with pytest.raises(IdentityError, match="the caller sent no certificate"):
        peer_credential(newest)
    with pytest.raises(IdentityError, match=r"does not use TLS 1\.3"):
        peer_credential({"x509_pem_cert": [pem], "ssl_tls_version": [b"TLSv1.2"]})


def test_certificates_without_one_identity_are_refused(
    tmp_path: Path, federation: TestFederation
) -> None:
    with pytest.raises(IdentityError, match="contains 0 Potluck identities"):
        credential_from_pem(federation.operator.authority.read_bytes())
    with pytest.raises(IdentityError, match="is not a certificate in PEM form"):
        credential_from_pem(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    key = ec.generate_private_key(ec.SECP256R1())
    uris = [f"potluck://f/operator/{name}" for name in ("a", "b")]
    both = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.Name([]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris]),
            critical=False,
        )
        .sign(key, SHA256())
    )
    with pytest.raises(IdentityError, match="contains 2 Potluck identities"):
        credential_from_pem(both.public_bytes(Encoding.PEM))


def test_missing_and_damaged_tls_files_are_named(
    tmp_path: Path, federation: TestFederation
) -> None:
    files = federation.operator
    absent, broken = tmp_path / "absent.pem", tmp_path / "broken.pem"
    broken.write_text("broken")
    for field in ("certificate", "key", "authority"):
        with pytest.raises(ConfigurationError, match=r"absent\.pem can't be read \(No such file"):
            with_files(files, **{field: absent}).load()
        with pytest.raises(ConfigurationError, match=r"broken\.pem is not an? .* in PEM form"):
            with_files(files, **{field: broken}).load()
    with pytest.raises(ConfigurationError, match="potluck pki issue"):
        with_files(files, certificate=absent).load()


def test_a_key_of_another_certificate_is_refused(federation: TestFederation) -> None:
    mixed = with_files(federation.operator, key=federation.coordinator.key)
    with pytest.raises(ConfigurationError, match=r"coordinator\.key is not the key of .*operator"):
        channel_credentials(mixed)


def test_a_certificate_of_another_authority_is_refused(
    tmp_path: Path, federation: TestFederation
) -> None:
    other = make_federation(tmp_path, {})
    mixed = with_files(other.coordinator, authority=federation.operator.authority)
    with pytest.raises(ConfigurationError, match="did not sign the certificate"):
        server_credentials(mixed)


def test_certificate_of_any_authority_in_a_bundle_is_accepted(
    tmp_path: Path, federation: TestFederation
) -> None:
    other = make_federation(tmp_path, {})
    bundle = tmp_path / "bundle.pem"
    parts = (federation.operator.authority, other.operator.authority)
    bundle.write_bytes(b"".join(path.read_bytes() for path in parts))
    for party in (federation, other):
        assert with_files(party.operator, authority=bundle).load().identity.name == "operator"


def test_certificate_outside_its_validity_period_is_refused(tmp_path: Path) -> None:
    pki.create_authority(tmp_path, "f", days=100, now=NOW)
    files = tls_files(pki.issue(tmp_path, Role.OPERATOR, "o", days=7, now=NOW))
    assert files.load(now=NOW).identity.name == "o"
    assert files.load(now=NOW - timedelta(minutes=9)).identity.name == "o"
    with pytest.raises(ConfigurationError, match=r"o\.pem is not valid before 2030-05-01 11:50"):
        files.load(now=NOW - timedelta(minutes=11))
    expired = (
        r"o\.pem expired on 2030-05-08 12:00 UTC; renew it with `potluck pki renew FOLDER NAME`"
    )
    with pytest.raises(ConfigurationError, match=expired):
        files.load(now=NOW + timedelta(days=8))


def test_a_certificate_of_another_role_is_refused(federation: TestFederation) -> None:
    with pytest.raises(IdentityError, match="for the role operator, but host is needed"):
        federation.operator.load(Role.HOST)
    with pytest.raises(IdentityError, match="for the role host, but coordinator is needed"):
        server_credentials(federation.hosts["host-0"])
    with pytest.raises(IdentityError, match="role coordinator, which can't be used to connect"):
        channel_credentials(federation.coordinator)


@given(
    source=st.sampled_from(["operator.pem", "coordinator.pem", "authority.pem"]),
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3
    ),
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore:Parsed a serial number which wasn't positive")
def test_damaged_certificate_is_loaded_or_refused_in_one_line(
    source: str, changes: list[tuple[float, int]], tmp_path: Path, federation: TestFederation
) -> None:
    der = bytearray(certificate(federation.folder / source).public_bytes(Encoding.DER))
    for place, value in changes:
        der[int(place * len(der))] = value
    damaged = tmp_path / "damaged.pem"
    body = base64.encodebytes(der)
    damaged.write_bytes(b"-----BEGIN CERTIFICATE-----\n" + body + b"-----END CERTIFICATE-----\n")
    for read in (
        with_files(federation.operator, certificate=damaged).load,
        with_files(federation.operator, authority=damaged).load,
        lambda: inspect(damaged),
        lambda: credential_from_pem(damaged.read_bytes()),
    ):
        try:
            read()
        except (ConfigurationError, IdentityError) as error:
            assert "\n" not in error.message  # noqa: PT017  # loading may also succeed


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_pki_commands_create_a_federation_and_print_the_next_step(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    output = run("init", folder, "--federation", "demo")
    assert f"potluck pki issue {folder} coordinator" in output
    output = run("issue", folder, "coordinator", "--host", "localhost", "--host", "::1")
    assert f'certificate = "{folder / "coordinator.pem"}"' in output
    run("issue", folder, "host", "lab-a", "--clients", "client-0:5,b", "--clients", "c")
    run("issue", folder, "operator", "ada")
    shown = json.loads(run("show", folder / "lab-a.pem", "--json"))
    assert (shown["role"], shown["clients"]) == ("host", ["client-0:5", "b", "c"])
    shown = json.loads(run("show", folder / "coordinator.pem", "--json"))
    assert (shown["name"], shown["hosts"]) == ("coordinator", ["localhost", "::1"])
    shown = json.loads(run("show", folder / "authority.pem", "--json"))
    assert (shown["role"], shown["federation"], shown["name"]) == ("authority", "demo", None)
    assert "client-0:5, b, c" in run("show", folder / "lab-a.pem")


def test_pki_commands_refuse_invalid_arguments_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="potluck pki init"):
        run("issue", tmp_path, "operator", "ada")
    with pytest.raises(ConfigurationError, match="a host needs a name"):
        run("issue", tmp_path, "host")
    with pytest.raises(ConfigurationError, match="can't read the certificate"):
        run("show", tmp_path / "absent.pem")


def test_relay_certificate_has_an_address_and_client_claims(tmp_path: Path) -> None:
    pki.create_authority(tmp_path, "f")
    with pytest.raises(ConfigurationError, match="add --host"):
        pki.issue(tmp_path, Role.RELAY, "gate", clients=["client-0:3"])
    with pytest.raises(ConfigurationError, match="add --clients"):
        pki.issue(tmp_path, Role.RELAY, "gate", hosts=["gate"])
    issued = pki.issue(tmp_path, Role.RELAY, "gate", clients=["client-0:3"], hosts=["gate"])
    found = certificate(issued.certificate).extensions
    usages = found.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {usage.dotted_string for usage in usages} == {"1.3.6.1.5.5.7.3.1", "1.3.6.1.5.5.7.3.2"}
    assert inspect(issued.certificate).identity == Identity(
        federation="f", role=Role.RELAY, name="gate", claims=parse_claims(["client-0:3"])
    )
