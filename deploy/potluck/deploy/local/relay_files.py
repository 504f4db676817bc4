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
    """A relay. address: where its hosts dial. hosts: their numbers."""

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
    """Put a relay before some hosts of a federation, whose files then name it.

    hosts: their numbers. port: where it listens on this machine. clients: what it may speak for,
    where that is not what these hosts do. Raises as `write_demo_files` does.
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
