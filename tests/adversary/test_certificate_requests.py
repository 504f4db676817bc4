"""Certificate requests that are exchanged, or ask for more than the person who signs them sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from potluck.common.errors import ConfigurationError
from potluck.common.net.identity import Identity, Role, parse_claims
from potluck.common.net.key_files import key_fingerprint, load_key, make_request, read_request
from potluck.deploy.commands.pki_commands import app
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki.certificates import read_certificate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pki.create_authority(tmp_path / "pki", "test")
    return tmp_path / "pki"


def host() -> Identity:
    claims = parse_claims(["client-6:9"])
    return Identity(federation="test", role=Role.HOST, name="lab-b", claims=claims)


def test_request_replaced_after_its_fingerprint_was_shown_is_not_signed(
    folder: Path, tmp_path: Path
) -> None:
    _, request, shown = make_request(tmp_path / "host", host())
    _, other, _ = make_request(tmp_path / "thief", host())
    asks = ["sign", str(folder), str(request), "--clients", "client-6:9"]

    def exchange(*_: object, **__: object) -> bool:
        request.write_bytes(other.read_bytes())
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.confirm", exchange)  # exchange it while a person compares
        signed = CliRunner().invoke(app, asks)
    assert signed.exit_code == 0, signed.output
    assert shown in signed.output
    key = read_certificate(folder / "lab-b.pem").public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key_fingerprint(key) == shown


@pytest.mark.parametrize(
    ("extension", "reason"),
    [
        (x509.BasicConstraints(ca=True, path_length=None), r"certificate authority \(CA:true\)"),
        (
            x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"?"),
            r"extension 1\.2\.3\.4",
        ),
        (
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE]),
            r"extension 2\.5\.29\.37",
        ),
    ],
)
def test_request_with_an_extension_is_refused_before_the_confirmation(
    folder: Path, tmp_path: Path, extension: x509.ExtensionType, reason: str
) -> None:
    key, path, _ = make_request(tmp_path / "host", host())
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(host().uri())])
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    for one in (names, extension):
        builder = builder.add_extension(one, critical=False)
    request = builder.sign(load_key(key), hashes.SHA256())
    path.write_bytes(request.public_bytes(Encoding.PEM))
    with pytest.raises(ConfigurationError, match=reason):
        read_request(path)
    asks = ["sign", str(folder), str(path), "--clients", "client-6:9"]
    refused = CliRunner().invoke(app, asks, input="y\n")
    assert refused.exit_code == 1
    assert "Sign it?" not in refused.output
    assert not (folder / "lab-b.pem").exists()
