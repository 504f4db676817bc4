"""Checks of everything that a relay needs, made before it serves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
from cryptography import x509

from potluck.common.errors import NotFoundError, RoundClosedError, StorageError, UnreachableError
from potluck.common.net.connection_errors import connection_error
from potluck.common.net.identity import Role, parse_certificates
from potluck.common.net.revocation import read_revocations
from potluck.common.net.tls import TlsMaterial, channel
from potluck.relay.config import RelayConfig
from potluck.relay.relay_state import RelayState
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import coordinator_pb2_grpc

_NO_RUN = "potluck-relay-check"
"""Run id for the test request. Real run ids are hexadecimal, so no coordinator has this run."""
_ANSWER_SECONDS = 20.0


def check_relay(config: RelayConfig) -> Iterator[str]:
    """Yield a line for each check that passes. Raises the error of the first that fails."""
    material = config.tls.load(Role.RELAY)
    claims = ", ".join(map(str, material.identity.claims))
    yield (
        f"certificate      relay {material.identity.name} of federation "
        f"{material.identity.federation}"
    )
    yield f"  sends for      {claims}"
    yield f"  addresses      {', '.join(_names(material))}"
    yield f"  valid until    {material.expires:%Y-%m-%d %H:%M} UTC"
    if config.metrics_tls is not None:
        config.metrics_tls.check(config.tls)
    if config.revoked is not None:
        found = read_revocations(config.revoked, config.tls.authority)
        yield f"revocation list  {config.revoked}, lists {len(found.revoked)} certificates"
    yield _check_address(config.listen)
    yield _check_state(config.state_directory)
    yield asyncio.run(_check_coordinator(config, material))


def _names(material: TlsMaterial) -> list[str]:
    """Return the names and addresses in the relay's certificate, at which hosts can dial it."""
    certificate = parse_certificates(material.certificate)[0]
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def _check_address(listen: str) -> str:
    host, _, port = listen.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
    except OSError as error:
        raise UnreachableError(
            f"can't listen on {listen}: {error.strerror}; stop the program that listens on this "
            "address, or choose another `listen`",
            address=listen,
        ) from error
    return f"address          {listen} is free"


def _check_state(folder: Path) -> str:
    """Check that the state directory is usable; if it is missing, that its parent is writable."""
    if folder.exists():
        RelayState(folder).close()
        return f"state directory  {folder}"
    parent = next(each for each in folder.absolute().parents if each.exists())
    probe = parent / f".{folder.name}.check"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise StorageError(
            f"can't create the state directory {folder}: {error.strerror}; set state_directory to "
            "a folder that this user may write to",
            path=folder,
        ) from error
    return f"state directory  {folder}, does not exist yet; the relay will create it"


async def _check_coordinator(config: RelayConfig, material: TlsMaterial) -> str:
    """Check that the coordinator admits the relay: ask it about a run that can't exist.

    The coordinator answers only callers that it admits.
    """
    [first, *_] = material.identity.claims
    request = rpc.LocateUploadRequest(
        client_id=next(first.ids()), run_id=_NO_RUN, update_id=_NO_RUN, blake3="0" * 64
    )
    async with channel(config.coordinator, config.tls) as connection:
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
            coordinator_pb2_grpc.CoordinatorServiceStub(connection)
        )
        with contextlib.suppress(NotFoundError, RoundClosedError):
            try:
                await stub.LocateUpload(request, timeout=_ANSWER_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise connection_error(error, config.coordinator, config.tls) from error
    return f"coordinator      {config.coordinator} admits this relay"
