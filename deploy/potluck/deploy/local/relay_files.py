"""Relays of a federation on this machine: their certificates and configuration files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from potluck.common.net.identity import Role
from potluck.deploy.local.demo_files import LOOPBACK, DemoFiles
from potluck.deploy.pki import authority as pki


@dataclass(frozen=True, kw_only=True)
class RelayFiles:
    """A relay. address: the address that its hosts dial. hosts: numbers of its hosts."""

    name: str
    config: Path
    address: str
    hosts: tuple[int, ...]


def write_relay(
    files: DemoFiles,
    name: str,
    hosts: Sequence[int],
    port: int,
    *,
    clients: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> RelayFiles:
    """Put a relay between the coordinator and some hosts: the hosts' files name the relay.

    hosts: numbers of these hosts. port: the port on which the relay listens on this machine.
    clients: client claims in the relay's certificate; None for the claims of its hosts. Raises the
    errors of `write_demo_files`.
    """
    address = f"{LOOPBACK}:{port}"
    documents = {number: tomlkit.parse(files.hosts[number].read_text()) for number in hosts}
    claims: list[str] = []
    for document in documents.values():
        claims += document.unwrap()["clients"]
    issued = pki.issue(
        files.folder / "pki", Role.RELAY, name, clients=clients or claims, hosts=[LOOPBACK]
    )
    config = files.folder / f"{name}.toml"
    values = {
        "coordinator": files.operator.coordinator,
        "listen": address,
        "state_directory": name,
        **(settings or {}),
        "tls": {
            "certificate": str(issued.certificate),
            "key": str(issued.key),
            "authority": str(issued.authority),
        },
    }
    config.write_text(tomlkit.dumps(values))
    for number, document in documents.items():
        document["coordinator"] = address
        files.hosts[number].write_text(tomlkit.dumps(document))
    return RelayFiles(name=name, config=config, address=address, hosts=tuple(hosts))
