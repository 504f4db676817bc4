"""The containers that an inventory asks for, with their options and files. Pure.

A container has two volumes. CONFIGURATION holds its configuration file and certificates; these
belong to root, and the container's user can only read them. STATE holds a folder that belongs to
the container's user. The container's own file system is read-only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tomlkit
from docker.types import DeviceRequest, LogConfig, Mount

from potluck.common.net.identity import Role
from potluck.common.process.logs import LogLevel
from potluck.deploy.machines.inventory import Inventory, MachineSettings
from potluck.deploy.machines.party_settings import BEFORE, COORDINATOR, HostSettings, RelaySettings

CONFIGURATION = "/etc/potluck"
STATE = "/var/lib/potluck"
STATE_FOLDER = "state"
STATE_DIRECTORY = f"{STATE}/{STATE_FOLDER}"
DATA = "/data"
PORT = 7443
"""Port of a coordinator or a relay inside its container."""

_LOOPBACK = "127.0.0.1"
METRICS_PORT = 9464
"""Port of the metrics inside a container."""

FEDERATION_LABEL = "potluck.federation"
PARTY_LABEL = "potluck.party"
DIGEST_LABEL = "potluck.digest"
CONFIGURATION_LABEL = "potluck.configuration"
TLS_LABEL = "potluck.certificates"

STOP_SECONDS = 15
_LOGS = {"max-size": "10m", "max-file": "3"}
_SCALE = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

_PROGRAMS = {
    Role.COORDINATOR: "potluck-server",
    Role.RELAY: "potluck-relay",
    Role.HOST: "potluck-client",
}

Files = Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyFiles:
    """Files of a party.

    tls: certificate.pem, key.pem, members, member keys and so on, by path below CONFIGURATION/tls;
    these files can change without a restart. others: other files by path below CONFIGURATION.
    """

    tls: Files
    others: Files = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredContainer:
    """Desired state of a container.

    options: the engine's options, without the image. quiet: True if the container's log level hides
    the log line of its connection.
    """

    party: str
    name: str
    role: Role
    image: str
    options: dict[str, Any]
    user: str
    files: PartyFiles
    quiet: bool = False

    @property
    def digest(self) -> str:
        """Digest of all settings that can only be changed by re-creating the container."""
        return _digest(json.dumps([self.options, self.user], sort_keys=True).encode())

    @property
    def configuration_digest(self) -> str:
        """Digest of the files that the program reads only at its start."""
        return _digest_files(self.files.others)

    @property
    def tls_digest(self) -> str:
        """Digest of the certificates, which the program reads again while it runs."""
        return _digest_files(self.files.tls)

    @property
    def file_labels(self) -> dict[str, str]:
        """Labels of the marker volume: digests of the files, set once the files are written."""
        return {CONFIGURATION_LABEL: self.configuration_digest, TLS_LABEL: self.tls_digest}

    @property
    def before(self) -> str:
        """Name of the old container, which is kept until the new one is connected."""
        return f"{self.name}{BEFORE}"

    @property
    def marker(self) -> str:
        """Name of an empty volume whose labels are the digests of the written files."""
        return f"{self.name}-files"

    @property
    def volumes(self) -> tuple[str, str]:
        """Names of the container's volumes: configuration and state."""
        return f"{self.name}-configuration", f"{self.name}-state"


def container_name(federation: str, party: str) -> str:
    """Return the name of a party's container."""
    return f"potluck-{federation}-{party}"


def desired_on(
    machine: MachineSettings, inventory: Inventory, files: Mapping[str, PartyFiles]
) -> list[DesiredContainer]:
    """Return a machine's desired containers: coordinator, relays, hosts. files: files by party."""
    found: list[DesiredContainer] = []
    coordinator = inventory.coordinator
    if coordinator is not None and coordinator.machine == machine.name:
        found.append(_coordinator(machine, inventory, files[COORDINATOR]))
    found += [_relay(machine, each, inventory, files[each.name]) for each in machine.relays]
    found += [_host(machine, host, inventory, files[host.name]) for host in machine.hosts]
    return found


def _coordinator(
    machine: MachineSettings, inventory: Inventory, files: PartyFiles
) -> DesiredContainer:
    settings = inventory.coordinator
    assert settings is not None  # noqa: S101  # checked by the caller
    values = {
        **_listening(machine, settings.port),
        **inventory.member_settings(None, CONFIGURATION),
    }
    if settings.data_directory is not None:
        values["data_directory"] = DATA
    options = _options(machine, inventory, COORDINATOR, settings.data_directory)
    options |= _limits(settings.cpus, settings.memory)
    options |= _watched(machine, "POTLUCK_SERVER", settings.metrics_port)
    _publish(machine, settings.port, options)
    return _container(
        machine,
        inventory,
        party=COORDINATOR,
        role=Role.COORDINATOR,
        image=inventory.image.coordinator,
        options=options,
        configuration=_configuration(values | settings.settings, CONFIGURATION),
        files=files,
        settings=settings.settings,
    )


def _relay(
    machine: MachineSettings, relay: RelaySettings, inventory: Inventory, files: PartyFiles
) -> DesiredContainer:
    options = _options(machine, inventory, relay.name, None)
    options |= _limits(relay.cpus, relay.memory)
    options |= _watched(machine, "POTLUCK_RELAY", relay.metrics_port)
    _publish(machine, relay.port, options)
    values = {"coordinator": inventory.address, **_listening(machine, relay.port)}
    return _container(
        machine,
        inventory,
        party=relay.name,
        role=Role.RELAY,
        image=inventory.image.relay,
        options=options,
        configuration=_configuration(values | relay.settings, CONFIGURATION),
        files=files,
        settings=relay.settings,
    )


def _listening(machine: MachineSettings, port: int) -> dict[str, Any]:
    """Return the listening settings of a coordinator or relay. port: the machine's port for it."""
    return {
        "listen": f"0.0.0.0:{port if machine.network == 'host' else PORT}",
        "state_directory": STATE_DIRECTORY,
        "log_format": "json",
        "revoked": f"{CONFIGURATION}/tls/revoked.pem",
    }


def _publish(machine: MachineSettings, port: int, options: dict[str, Any]) -> None:
    """Add the engine's options that publish a coordinator's or relay's port on the machine."""
    if machine.network != "host":
        options["ports"] = {**options.get("ports", {}), f"{PORT}/tcp": port}


def _host(
    machine: MachineSettings, host: HostSettings, inventory: Inventory, files: PartyFiles
) -> DesiredContainer:
    options = _options(machine, inventory, host.name, host.data_directory)
    options |= _limits(host.cpus, host.memory)
    if host.shared_memory is not None:
        options["shm_size"] = _bytes(host.shared_memory)
    if host.gpus:
        request = DeviceRequest(device_ids=list(host.gpus), capabilities=[["gpu"]])
        options["device_requests"] = [request]
    options |= _watched(machine, "POTLUCK_CLIENT", host.metrics_port)
    return _container(
        machine,
        inventory,
        party=host.name,
        role=Role.HOST,
        image=inventory.image.client,
        options=options,
        configuration=host_configuration(
            host, inventory, folder=CONFIGURATION, state=STATE_DIRECTORY, data=DATA
        ),
        files=files,
        settings=host.settings,
    )


def _container(
    machine: MachineSettings,
    inventory: Inventory,
    *,
    party: str,
    role: Role,
    image: str,
    options: dict[str, Any],
    configuration: str,
    files: PartyFiles,
    settings: Mapping[str, Any],
) -> DesiredContainer:
    options["entrypoint"] = [_PROGRAMS[role], "--config", f"{CONFIGURATION}/potluck.toml"]
    options["command"] = []
    others = {**files.others, "potluck.toml": configuration.encode()}
    return DesiredContainer(
        party=party,
        name=container_name(inventory.federation, party),
        role=role,
        image=image,
        options=options,
        user=machine.user,
        files=PartyFiles(tls=files.tls, others=others),
        quiet=is_quiet(settings),
    )


def is_quiet(settings: Mapping[str, Any]) -> bool:
    """Return True if a party's log level hides the log line that reports its connection."""
    return settings.get("log_level") in (LogLevel.WARNING, LogLevel.ERROR)


def host_configuration(
    host: HostSettings, inventory: Inventory, *, folder: str, state: str, data: str | None
) -> str:
    """Return the text of a host's configuration file, in TOML.

    folder: path of its certificates and keys. state: path of its state. data: path of its clients'
    data, if any. All paths are on the machine, or in the container.
    """
    values: dict[str, Any] = {
        "coordinator": inventory.dialled_by(host),
        "clients": list(host.clients),
        "state_directory": state,
        "device": host.trains_on,
        "log_format": "json",
    }
    if host.data_directory is not None:
        values["data_directory"] = data
    values |= inventory.member_settings(host, folder)
    return _configuration(values | host.settings, folder)


def _configuration(values: Mapping[str, Any], folder: str) -> str:
    names = ("certificate", "key", "authority")
    tls = {name: f"{folder}/tls/{name}.pem" for name in names}
    return tomlkit.dumps({**values, "tls": tls})


def _options(
    machine: MachineSettings, inventory: Inventory, party: str, data: str | None
) -> dict[str, Any]:
    name = container_name(inventory.federation, party)
    mounts = [
        Mount(CONFIGURATION, f"{name}-configuration", type="volume"),
        Mount(STATE, f"{name}-state", type="volume"),
    ]
    if data is not None:
        mounts.append(Mount(DATA, data, type="bind", read_only=True))
    return {
        "user": machine.user,
        "mounts": mounts,
        "network_mode": machine.network,
        "labels": dict(machine.labels),
        "read_only": True,
        "tmpfs": {"/tmp": "mode=1777"},  # noqa: S108  # inside the container
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart_policy": {"Name": "unless-stopped"},
        "log_config": LogConfig(type=LogConfig.types.JSON, config=_LOGS),
    }


def _watched(machine: MachineSettings, prefix: str, port: int | None) -> dict[str, Any]:
    """Return the container options for metrics: environment, health check and published port.

    The container serves metrics for its health check, at a port of the container's loopback
    interface. A port that the inventory names is on the machine's loopback interface. Other
    machines need a tunnel or metrics_tls to reach it.
    """
    variable = f"{prefix}_METRICS_ADDRESS"
    if machine.network == "host":
        address = "" if port is None else f"{_LOOPBACK}:{port}"
        return {
            "environment": {"HOME": STATE_DIRECTORY, variable: address},
            "healthcheck": {"test": ["NONE"]},
        }
    inside = _LOOPBACK if port is None else "0.0.0.0"  # noqa: S104  # what is published is not its loopback
    address = f"{inside}:{METRICS_PORT}"
    watched: dict[str, Any] = {"environment": {"HOME": STATE_DIRECTORY, variable: address}}
    if port is not None:
        watched["ports"] = {f"{METRICS_PORT}/tcp": (_LOOPBACK, port)}
    return watched


def _limits(cpus: float | None, memory: str | None) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if cpus is not None:
        limits["nano_cpus"] = int(cpus * 1e9)
    if memory is not None:
        limits["mem_limit"] = _bytes(memory)
    return limits


def _bytes(text: str) -> int:
    return int(text[:-1]) * _SCALE[text[-1]]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _digest_files(files: Files) -> str:
    each = [(name, hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items())]
    return _digest(json.dumps(each).encode())
