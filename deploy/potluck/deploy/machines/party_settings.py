"""Settings of the parties in an inventory: coordinator, relays, hosts."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from potluck.common.names import is_name
from potluck.common.settings.configuration import Settings

COORDINATOR = "coordinator"
BEFORE = "-before"
"""End of the name of a container that is being replaced."""
HOST = r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9a-fA-F:]+\]"
"""Pattern of a machine's name or address."""

_ADDRESS = re.compile(rf"({HOST}):[0-9]{{1,5}}")


def _party_name(name: str) -> str:
    if not is_name(name):
        raise ValueError(
            "must be of lower-case letters, digits, '.', '_' and '-', start with a letter or "
            "digit, and have 63 characters at most"
        )
    return name


def _absolute(path: str) -> str:
    if not PurePosixPath(path).is_absolute() or "\0" in path:
        raise ValueError("must be an absolute path on that machine")
    return path


def _address(address: str) -> str:
    if _ADDRESS.fullmatch(address) is None:
        raise ValueError("must be HOST:PORT")
    return address


def _gpus(gpus: tuple[str, ...]) -> tuple[str, ...]:
    for gpu in gpus:
        if re.fullmatch(r"[0-9]{1,3}|(GPU|MIG)-[A-Za-z0-9-]{1,64}", gpu) is None:
            raise ValueError(f"{gpu[:40]!r} is not the index or the UUID of a GPU")
    return gpus


PartyName = Annotated[str, AfterValidator(_party_name)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Image = Annotated[str, Field(pattern=r"^[a-z0-9][A-Za-z0-9._/:@-]{0,254}$")]
Memory = Annotated[str, Field(pattern=r"^[1-9][0-9]*[kmg]$")]
Port = Annotated[int, Field(ge=1, le=65_535)]
Cpus = Annotated[
    float | None,
    Field(gt=0, description="Number of CPUs that the container may use. Unset: all."),
]
MetricsPort = Annotated[
    Port | None,
    Field(
        description="Port on the machine that serves the metrics, on 127.0.0.1 over plain HTTP.\n"
        "Unset: not served."
    ),
]
Address = Annotated[str, AfterValidator(_address)]


class CoordinatorSettings(Settings):
    """The coordinator's container."""

    machine: str = Field(description="Name of the machine that runs the coordinator.")
    port: Port = Field(
        default=7443, description="Port on the machine at which the coordinator listens."
    )
    names: tuple[str, ...] = Field(
        default=(),
        description="Further host names and IP addresses for the coordinator's certificate,\n"
        "besides `address`.",
    )
    cpus: Cpus = None
    memory: Memory | None = Field(
        default=None, description="Memory limit of the container, such as 4g. Unset: no limit."
    )
    data_directory: AbsolutePath | None = Field(
        default=None,
        description="Folder on the machine with the coordinator's held-out data,\n"
        "if the task needs it.",
    )
    metrics_port: MetricsPort = None
    settings: dict[str, Any] = Field(
        default={},
        description="Further settings of the coordinator's configuration; see `potluck-server\n"
        "config`.",
    )


class RelaySettings(Settings):
    """A relay's container."""

    name: PartyName = Field(description="Name of the relay, also in its certificate.")
    address: Address = Field(description="Address at which hosts dial the relay, HOST:PORT.")
    port: Port = Field(default=7443, description="Port on the machine at which the relay listens.")
    names: tuple[str, ...] = Field(
        default=(),
        description="Further host names and IP addresses for the relay's certificate, besides\n"
        "`address`.",
    )
    cpus: Cpus = None
    memory: Memory | None = Field(
        default=None, description="Memory limit of the container, such as 4g. Unset: no limit."
    )
    metrics_port: MetricsPort = None
    settings: dict[str, Any] = Field(
        default={},
        description="Further settings of the relay's configuration; see `potluck-relay config`.",
    )


class HostSettings(Settings):
    """A client process."""

    name: PartyName = Field(description="Name of the host, also in its certificate.")
    clients: tuple[str, ...] = Field(
        min_length=1, description="Clients of the host: ids, or ranges such as client-0:5."
    )
    relay: PartyName | None = Field(
        default=None,
        description="Name of the relay that the host dials instead of the coordinator. Unset:\n"
        "the host dials the coordinator.",
    )
    data_directory: AbsolutePath | None = Field(
        default=None, description="Folder on the machine with the clients' data; mounted read-only."
    )
    gpus: Annotated[tuple[str, ...], AfterValidator(_gpus)] = Field(
        default=(),
        description='GPUs of the host, by index or UUID, such as ["0"]. For several GPUs in\n'
        "parallel, use one host per GPU. Empty: no GPU.",
    )
    device: str | None = Field(
        default=None,
        description="Device for training. Unset: cuda:0 (the first GPU of `gpus`), or cpu if\n"
        "`gpus` is empty.",
    )
    cpus: Cpus = None
    memory: Memory | None = Field(
        default=None, description="Memory limit of the container, such as 16g. Unset: no limit."
    )
    shared_memory: Memory | None = Field(
        default=None,
        description="Size of /dev/shm in the container, for data loaders, such as 1g.",
    )
    member_keys: Path | None = Field(
        default=None,
        description="Local folder with the CLIENT.key files of `potluck pki member`. Unset: the\n"
        "folder `members` in federation_root, if that is set.",
    )
    metrics_port: MetricsPort = None
    settings: dict[str, Any] = Field(
        default={},
        description="Further settings of the host's configuration; see `potluck-client config`.",
    )

    @property
    def trains_on(self) -> str:
        """The device in the host's configuration; a container numbers its GPUs from 0."""
        return self.device or ("cuda:0" if self.gpus else "cpu")
