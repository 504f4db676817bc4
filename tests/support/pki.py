"""Throwaway federations for tests: an authority and a certificate for each party."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from potluck.common.net.identity import Role
from potluck.common.net.tls import TlsFiles
from potluck.deploy.pki import authority as pki
from potluck.server.service.certificate import ServerCertificate

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class TestFederation:
    """The TLS files of every party. folder: folder of the authority."""

    __test__ = False

    folder: Path
    name: str
    coordinator: TlsFiles
    operator: TlsFiles
    hosts: dict[str, TlsFiles]


def tls_files(issued: pki.IssuedFiles) -> TlsFiles:
    return TlsFiles(certificate=issued.certificate, key=issued.key, authority=issued.authority)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return the gRPC credentials of a coordinator with these files."""
    return ServerCertificate(files).credentials()


def make_federation(
    folder: Path,
    hosts: Mapping[str, Sequence[str]] | None = None,
    *,
    name: str = "test",
    addresses: Sequence[str] = LOOPBACK,
) -> TestFederation:
    """Make an authority in `folder`, and certificates for a coordinator at `addresses`, an operator
    and hosts. hosts: the clients of each host, by default host-0 with client-0:5."""
    claims = {"host-0": ["client-0:5"]} if hosts is None else hosts
    pki.create_authority(folder, name)
    return TestFederation(
        folder=folder,
        name=name,
        coordinator=tls_files(pki.issue(folder, Role.COORDINATOR, "coordinator", hosts=addresses)),
        operator=tls_files(pki.issue(folder, Role.OPERATOR, "operator")),
        hosts={
            host: tls_files(pki.issue(folder, Role.HOST, host, clients=clients))
            for host, clients in claims.items()
        },
    )
