"""Creates keys, and requests to certify them, on the machine that will use the key.

A request (PKCS #10) contains the public key and the requested identity; the private key never
leaves the machine.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from potluck.common.errors import ConfigurationError, IdentityError, StorageError
from potluck.common.net.identity import SCHEME, Identity, parse_identity

KEY_MODE = 0o600
PUBLIC_MODE = 0o644
MAXIMUM_REQUEST_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateRequest:
    """A signing request whose signature has been checked."""

    identity: Identity
    public_key: ec.EllipticCurvePublicKey


def write_whole(path: Path, data: bytes, mode: int) -> None:
    """Write a file atomically.

    It is never incomplete, and never readable for users that `mode` excludes.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_file(path: Path, data: bytes, mode: int, *, remedy: str = "") -> None:
    """Write a file as `write_whole` does. Create its folder if it is missing.

    remedy: advice in the error if that fails. Raises StorageError.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, data, mode)
    except OSError as error:
        text = f"{error.filename or path.parent} can't be written ({error.strerror})"
        raise StorageError(f"{text}; {remedy}" if remedy else text) from error


def private_pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    """Return a private key in PEM form, unencrypted."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def key_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 digest of a public key, which two people can compare over another
    channel."""
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def make_request(folder: Path, identity: Identity) -> tuple[Path, Path, str]:
    """Create NAME.key in `folder`, and NAME.csr, the request to certify this key as `identity`.

    An existing key is kept, so a repeated call is harmless. Returns the paths of both files, and
    the key's fingerprint. Raises ConfigurationError if an existing key file does not contain a
    P-256 key, StorageError if a file can't be written.
    """
    key_path, request_path = folder / f"{identity.name}.key", folder / f"{identity.name}.csr"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not key_path.exists():
            made = ec.generate_private_key(ec.SECP256R1())
            write_whole(key_path, private_pem(made), KEY_MODE)
        key = load_key(key_path)
        request = (
            x509.CertificateSigningRequestBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)]))
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri())]),
                critical=False,
            )
            .sign(key, hashes.SHA256())
        )
        write_whole(request_path, request.public_bytes(Encoding.PEM), PUBLIC_MODE)
    except OSError as error:
        raise StorageError(
            f"{error.filename or folder} can't be written ({error.strerror}); choose another folder"
        ) from error
    return key_path, request_path, key_fingerprint(key.public_key())


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the P-256 key in a file. Raises ConfigurationError."""
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigurationError(f"key {path} can't be read ({error.strerror})") from error
    except (UnsupportedAlgorithm, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is not an unencrypted private key in PEM form") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not _is_p256(key.public_key()):
        raise ConfigurationError(
            f"{path} is not a P-256 key, and grpcio accepts only P-256 keys; make a new key"
        )
    return key


def read_request(path: Path) -> CertificateRequest:
    """Read the signing request in a file. Raises ConfigurationError or IdentityError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAXIMUM_REQUEST_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"request {path} can't be read ({error.strerror})") from error
    if len(data) > MAXIMUM_REQUEST_BYTES:
        raise ConfigurationError(
            f"{path} has more than {MAXIMUM_REQUEST_BYTES} bytes, so that it can't be a signing "
            "request; make one with `potluck-client enroll`"
        )
    try:
        return parse_request(data)
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is not a usable signing request: {error}; make one with "
            "`potluck-client enroll`"
        ) from error


def parse_request(pem: bytes) -> CertificateRequest:
    """Parse the PEM text of a signing request.

    Raises ValueError if the request is malformed or asks for an extension other than names;
    IdentityError if its identity is not allowed.
    """
    try:
        request = x509.load_pem_x509_csr(pem)
        genuine, key = request.is_signature_valid, request.public_key()
        _check_extensions(request.extensions)
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (
        TypeError,
        UnsupportedAlgorithm,
        x509.DuplicateExtension,
        x509.ExtensionNotFound,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
    ) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not _is_p256(key):
        raise ValueError("the key of the request is not a P-256 key")
    if not genuine:
        raise ValueError("the request is not signed with the key that it contains")
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    ours = [uri for uri in uris if uri.startswith(f"{SCHEME}:")]
    if len(ours) != 1:
        raise IdentityError(
            f"the request contains {len(ours)} Potluck identities instead of one; make one with "
            "`potluck-client enroll`"
        )
    return CertificateRequest(identity=parse_identity(ours[0]), public_key=key)


def _check_extensions(extensions: x509.Extensions) -> None:
    """Raise ValueError for an extension that a member's certificate never has.

    Signing ignores all extensions. Without this check, the person who signs would not notice that
    the request asks for one.
    """
    for one in extensions:
        if isinstance(one.value, x509.BasicConstraints) and one.value.ca:
            raise ValueError("the request asks for the rights of a certificate authority (CA:true)")
        if not isinstance(one.value, x509.SubjectAlternativeName | x509.BasicConstraints):
            raise ValueError(
                f"the request asks for the extension {one.oid.dotted_string}, which is not allowed"
            )


def _is_p256(key: ec.EllipticCurvePublicKey) -> bool:
    return isinstance(key.curve, ec.SECP256R1)
