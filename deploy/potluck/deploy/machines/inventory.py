"""federation.toml: the machines of a federation, and the programs to run on each of them.

A *machine* is a Docker engine or a Slurm partition. A *host* is a client process on it. Hosts may
dial a *relay*, on any machine, instead of the coordinator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from potluck.common.errors import ConfigurationError, PotluckError
from potluck.common.net.build_version import RELEASE
from potluck.common.net.identity import expand_clients
from potluck.common.real_time import Seconds
from potluck.common.settings.configuration import Settings, annotated_example, load
from potluck.common.settings.configuration_errors import INVENTORY
from potluck.deploy.machines.party_settings import (
    BEFORE,
    COORDINATOR,
    HOST,
    AbsolutePath,
    Address,
    CoordinatorSettings,
    HostSettings,
    Image,
    PartyName,
    RelaySettings,
)

FILE_NAME = "federation.toml"
ENVIRONMENT_PREFIX = "POTLUCK_DEPLOY"

_ENGINE = re.compile(
    rf"ssh://([A-Za-z0-9._][A-Za-z0-9._-]{{0,63}}@)?({HOST})(:[0-9]{{1,5}})?"
    rf"|tcp://({HOST}):[0-9]{{1,5}}"
    r"|unix:///[^\s]+"
)


def _engine(engine: str) -> str:
    if engine != "slurm" and _ENGINE.fullmatch(engine) is None:
        raise ValueError("must be ssh://USER@HOST[:PORT], unix:///PATH, tcp://HOST:PORT or slurm")
    return engine


def _sbatch_options(options: tuple[str, ...]) -> tuple[str, ...]:
    for option in options:
        if not option.startswith("-"):
            raise ValueError(
                f"{option[:60]!r} is not an option of sbatch; write an option like --partition=gpu"
            )
    return options


class ImageSettings(Settings):
    """Container images, and where machines get them."""

    coordinator: Image = Field(
        default=f"potluck/coordinator:{RELEASE}",
        description="The coordinator's image.",
    )
    client: Image = Field(
        default=f"potluck/client:{RELEASE}",
        description="The hosts' image; it contains no server code.",
    )
    relay: Image = Field(default=f"potluck/relay:{RELEASE}", description="The relays' image.")
    source: Literal["registry", "stream"] = Field(
        default="stream",
        description="How machines get the images. stream: from the local engine, so that\n"
        "machines need no registry. registry: each machine pulls the images; name images by\n"
        "digest to fix their versions.",
    )
    engine: str = Field(
        default="unix:///var/run/docker.sock",
        pattern=r"^unix:///[^\s]+$",
        description="Address of the local Docker engine, from which container images are sent to\n"
        "the machine.",
    )


class EngineTls(Settings):
    """TLS files for a tcp:// engine."""

    authority: Path = Field(description="CA certificate of the engine, ca.pem.")
    certificate: Path = Field(description="The operator's certificate for the engine.")
    key: Path = Field(description="Private key of the operator's certificate.")


class SlurmSettings(Settings):
    """Settings with which hosts are submitted as jobs to a Slurm cluster."""

    directory: AbsolutePath = Field(
        description="Folder that the operator's machine and the cluster's nodes share. It holds\n"
        "configuration, certificates, state and logs of the hosts."
    )
    options: Annotated[tuple[str, ...], AfterValidator(_sbatch_options)] = Field(
        default=(),
        description='Options for sbatch, such as ["--partition=gpu", "--gres=gpu:2",\n'
        '"--time=24:00:00"].',
    )
    setup: tuple[str, ...] = Field(
        default=(),
        description="Shell commands that run before the hosts start, such as module load cuda or\n"
        "source /shared/potluck/.venv/bin/activate.",
    )


class MachineSettings(Settings):
    """A machine: a Docker engine or a Slurm partition, and the programs to run there."""

    name: PartyName = Field(description="Name of the machine, in this file and in the output.")
    engine: Annotated[str, AfterValidator(_engine)] = Field(
        description="Address of the machine's Docker engine: ssh://USER@HOST[:PORT],\n"
        "unix:///PATH, tcp://HOST:PORT; or slurm for a cluster to which the operator's machine\n"
        "submits jobs."
    )
    socket: AbsolutePath = Field(
        default="/var/run/docker.sock",
        description="Path of the engine's socket on the machine; used with ssh://.",
    )
    ssh_options: tuple[str, ...] = Field(
        default=(),
        description="Options for the ssh program, such as -i and a key's path; used with ssh://.\n"
        "~/.ssh/config also applies.",
    )
    tls: EngineTls | None = Field(
        default=None, description="Certificates for the engine; used with tcp://."
    )
    slurm: SlurmSettings | None = Field(
        default=None,
        description="Settings of the job that runs the machine's hosts; used with slurm.",
    )
    network: Literal["bridge", "host"] = Field(
        default="bridge",
        description='Docker network of the machine\'s containers; "host" if NAT prevents\n'
        "connections.",
    )
    user: str = Field(
        default="10001:10001",
        pattern=r"^[0-9]{1,9}:[0-9]{1,9}$",
        description="User and group that containers run as; they must be able to read the data.",
    )
    labels: dict[str, str] = Field(default={}, description="Labels of the machine's containers.")
    relays: tuple[RelaySettings, ...] = Field(
        default=(),
        description="A relay on the machine, for hosts that name it as their `relay`; one table\n"
        "per relay.",
    )
    hosts: tuple[HostSettings, ...] = Field(
        default=(), description="A client process on the machine; one table per host."
    )

    @model_validator(mode="after")
    def _needs_tls(self) -> Self:
        if self.engine.startswith("tcp://") and self.tls is None:
            raise ValueError(
                "a tcp:// engine needs its table `tls`: without TLS, anyone who reaches the port "
                "controls the machine"
            )
        if (self.engine == "slurm") != (self.slurm is not None):
            raise ValueError(
                '`engine = "slurm"` and a table `slurm` need each other; add the missing one'
            )
        if self.slurm is not None and self.relays:
            raise ValueError(
                "a relay can't be a Slurm job, because it must run longer than time limits; give "
                "the relay a machine with an engine, or run it under systemd"
            )
        return self


class Inventory(Settings):
    """The desired state of the whole federation."""

    kind = INVENTORY

    federation: PartyName = Field(description="Name of the federation, as in `potluck pki init`.")
    address: Address = Field(
        description="Address at which hosts and operators reach the coordinator, HOST:PORT."
    )
    pki: Path = Field(
        default=Path("pki"),
        description="Folder of the TLS authority. Missing certificates are issued there.",
    )
    federation_root: Path | None = Field(
        default=None,
        description="Local folder of the federation root (`potluck pki root`), for secure sums\n"
        "and signed profiles. The coordinator and all hosts get root.pub and members.json; each\n"
        "host also gets its clients' keys. root.key stays on the operator's machine. Unset: no\n"
        "secure sums.",
    )
    connect_seconds: Seconds = Field(
        default=180,
        description="Seconds within which a container that `up` has started must connect. If it\n"
        "does not connect, the replaced container is restored. Slow machines need more.",
    )
    image: ImageSettings = Field(
        default=ImageSettings(), description="Container images of the federation."
    )
    coordinator: CoordinatorSettings | None = Field(
        default=None,
        description="Container of the coordinator; omit this table if the\n"
        "coordinator runs elsewhere.",
    )
    machines: tuple[MachineSettings, ...] = Field(description="A machine; one table per machine.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.machines:
            raise ValueError("the inventory has no [[machines]]")
        _refuse_repeated("machine", (machine.name for machine in self.machines))
        names = [host.name for _, host in self.hosts()] + [each.name for _, each in self.relays()]
        _refuse_repeated("host or relay", names)
        try:
            expand_clients(text for _, host in self.hosts() for text in host.clients)
        except PotluckError as error:
            raise ValueError(error.message) from error
        if COORDINATOR in names:
            raise ValueError(f"a host or relay can't be called {COORDINATOR!r}")
        for name in names:
            if name.endswith(BEFORE):
                raise ValueError(
                    f"a host or relay can't be called {name!r}, because {BEFORE} marks containers "
                    "that are being replaced; choose another name"
                )
        self._check_relays()
        if self.coordinator is not None:
            found = {machine.name: machine for machine in self.machines}
            machine = found.get(self.coordinator.machine)
            if machine is None:
                raise ValueError(
                    f"coordinator.machine {self.coordinator.machine!r} is not one of the machines "
                    f"{', '.join(sorted(found))}"
                )
            if machine.engine == "slurm":
                raise ValueError(
                    "the coordinator can't be a Slurm job, because it must run longer than time "
                    "limits; give the coordinator a machine with an engine, or run it under "
                    "systemd"
                )
        return self

    def _check_relays(self) -> None:
        relays = {relay.name for _, relay in self.relays()}
        behind = {host.name: host.relay for _, host in self.hosts() if host.relay is not None}
        for name, relay in behind.items():
            if relay not in relays:
                raise ValueError(
                    f"host {name!r} has relay {relay!r}, which is not one of the relays "
                    f"{', '.join(sorted(relays)) or '(none)'}"
                )
        for name in sorted(relays.difference(behind.values())):
            raise ValueError(
                f"relay {name!r} has no hosts; set `relay` of the hosts that connect to this relay"
            )

    def member_keys_of(self, host: HostSettings) -> Path | None:
        """Return the local folder with the member keys of a host's clients."""
        if host.member_keys is None and self.federation_root is not None:
            return self.federation_root / "members"
        return host.member_keys

    def member_settings(self, host: HostSettings | None, folder: str) -> dict[str, str]:
        """Return the membership settings of a host, or of the coordinator (None).

        folder: path of the party's files on its machine.
        """
        values = {}
        if self.federation_root is not None:
            values = {
                "federation_root": f"{folder}/root.pub",
                "members": f"{folder}/tls/members.json",
            }
        if host is not None and self.member_keys_of(host) is not None:
            values["member_key"] = f"{folder}/tls/members"
        return values

    def hosts(self) -> Iterator[tuple[MachineSettings, HostSettings]]:
        """Yield all hosts, each with its machine."""
        for machine in self.machines:
            for host in machine.hosts:
                yield machine, host

    def relays(self) -> Iterator[tuple[MachineSettings, RelaySettings]]:
        """Yield all relays, each with its machine."""
        for machine in self.machines:
            for relay in machine.relays:
                yield machine, relay

    def behind(self, relay: str) -> tuple[str, ...]:
        """Return the clients of the hosts behind a relay, as the hosts' tables name them."""
        return tuple(text for _, h in self.hosts() if h.relay == relay for text in h.clients)

    def dialled_by(self, host: HostSettings) -> str:
        """Return the address that a host dials, as HOST:PORT: its relay's or the coordinator's."""
        return next((r.address for _, r in self.relays() if r.name == host.relay), self.address)

    def machines_named(self, names: Iterable[str], *, slurm: bool) -> list[MachineSettings]:
        """Return the machines with these names, of one kind: Slurm's, or all others.

        If there are no names, return all machines of that kind. Raises ConfigurationError for an
        unknown name.
        """
        known = {m.name: m for m in self.machines if (m.engine == "slurm") == slurm}
        for name in names:
            if name not in known:
                raise ConfigurationError(
                    f"{name!r} is not one of the machines {', '.join(sorted(known)) or '(none)'}"
                )
        wanted = set(names) or known.keys()
        return [machine for name, machine in known.items() if name in wanted]


def load_inventory(path: Path) -> Inventory:
    """Load the inventory in a file. Raises ConfigurationError, with one line per problem."""
    return load(Inventory, path, environment_prefix=ENVIRONMENT_PREFIX)


def _refuse_repeated(what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{what} {name!r} occurs {count} times; names must differ")


_EXAMPLES = {
    "federation": '"demo"',
    "address": '"gpu-1.example.org:7443"',
    "coordinator.machine": '"gpu-1"',
    "machines.name": '"gpu-1"',
    "machines.engine": '"ssh://ops@gpu-1.example.org"',
    "machines.hosts.name": '"gpu-1-a"',
    "machines.hosts.clients": '["client-0:5"]',
}


def example_inventory() -> str:
    """Return the annotated example that `potluck deploy config` prints."""
    return annotated_example(Inventory, _EXAMPLES)
