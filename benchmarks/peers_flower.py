"""Run the benchmark's work on Flower's deployment: a SuperLink, a SuperNode per client, `flwr run`.

Versions from 1.40 on use HTTP instead of gRPC. Connections of nodes and operators use TLS with the
server's certificate. Nodes are not authenticated. With gRPC, processes on the same machine
communicate unencrypted, as is Flower's default.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import tomlkit
from packaging.version import Version
from peers_memory import Memory, processes_of
from peers_processes import Programs, programs_in, until
from peers_work import Measurement, Notes, Work, measurement

from potluck.common.errors import ConfigurationError, RunError
from potluck.common.net.identity import Role
from potluck.deploy.local.demo_files import LOOPBACK, reserved_port
from potluck.deploy.pki import authority as pki

APP = Path(__file__).parent / "peers" / "flower"
CONNECTION = "benchmark"
FIRST_WITH_SOME_HTTP = Version("1.37")
FIRST_WITH_HTTP = Version("1.40")


def settings(home: Path, binaries: Path) -> list[str]:
    """Return the environment of all of Flower's processes: no user settings, no telemetry."""
    return [
        f"FLWR_HOME={home}",
        f"PATH={binaries}:/usr/bin:/bin",
        "FLWR_TELEMETRY_ENABLED=0",
        "FLWR_DISABLE_UPDATE_CHECK=1",
        "PYTHONPATH=",
    ]


def check(version: str) -> None:
    """Raise ConfigurationError for versions that use both gRPC and HTTP."""
    if FIRST_WITH_SOME_HTTP <= Version(version) < FIRST_WITH_HTTP:
        raise ConfigurationError(
            f"Flower {version} uses both gRPC and HTTP; name a version below "
            f"{FIRST_WITH_SOME_HTTP}, or {FIRST_WITH_HTTP} or newer"
        )


def superlink(issued: pki.IssuedFiles, ports: Sequence[int], *, http: bool) -> list[str]:
    """Return the command of the SuperLink.

    ports: ports of the Control API, the Fleet API and the Runtime API; HTTP uses only the first
    port.
    """
    control, fleet, runtime = (f"{LOOPBACK}:{port}" for port in ports)
    grpc = ["--control-api-address", control, "--fleet-api-address", fleet]
    return [
        "flower-superlink",
        *("--ssl-ca-certfile", str(issued.authority)),
        *("--ssl-certfile", str(issued.certificate)),
        *("--ssl-keyfile", str(issued.key)),
        "--disable-runtime-dependency-installation",
        *(listening(ports[0]) if http else [*grpc, "--serverappio-api-address", runtime]),
    ]


def supernode(authority: Path, fleet: int, runtime: int, *, http: bool) -> list[str]:
    """Return the command of a SuperNode."""
    return [
        "flower-supernode",
        *("--root-certificates", str(authority)),
        *("--superlink", f"{LOOPBACK}:{fleet}"),
        *(listening(runtime) if http else ["--clientappio-api-address", f"{LOOPBACK}:{runtime}"]),
    ]


def listening(port: int) -> list[str]:
    """Return the arguments that name a program's HTTP address."""
    return ["--host", LOOPBACK, "--port", str(port)]


def write_home(home: Path, authority: Path, control: int) -> None:
    """Write Flower's configuration file."""
    home.mkdir()
    connection = {"address": f"{LOOPBACK}:{control}", "root-certificates": str(authority)}
    table = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    (home / "config.toml").write_text(tomlkit.dumps(table))


async def measure(folder: Path, binaries: Path, version: str, work: Work) -> Measurement:
    """Run the work on Flower, in a version that `check` accepts. Raises RunError."""
    loop = asyncio.get_running_loop()
    http = Version(version) >= FIRST_WITH_HTTP
    async with programs_in(folder) as programs, contextlib.AsyncExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(3 + work.clients)]
        certificates = folder / "pki"
        pki.create_authority(certificates, "benchmark")
        issued = pki.issue(certificates, Role.COORDINATOR, "superlink", hosts=[LOOPBACK])
        home, app = folder / "home", folder / "app"
        write_home(home, issued.authority, ports[0])
        shutil.copytree(APP, app, ignore=shutil.ignore_patterns("submit.py", "__pycache__"))
        notes = Notes(folder / "notes")
        environment = settings(home, binaries)
        config = (
            f"parameters={work.parameters} clients={work.clients} rounds={work.rounds + 1} "
            f"record='{notes.path}'"
        )

        launched = loop.time()
        link = await programs.start(
            "superlink", superlink(issued, ports[:3], http=http), environment
        )
        nodes = [
            await programs.start(
                f"supernode-{number}",
                supernode(issued.authority, ports[0 if http else 1], port, http=http),
                environment,
            )
            for number, port in enumerate(ports[3:])
        ]
        submit = ["python", str(APP / "submit.py"), str(ports[0]), str(notes.path)]
        run = [str(app), CONNECTION, "--format", "json", "--run-config", config]
        submission = await programs.start("submit", [*submit, *run], environment)
        memory = Memory(lambda: processes_of("flower-superlink", [link.group]))
        async with memory.sampled():
            await until(
                lambda: len(notes.commits()) > work.rounds or bool(notes.read("failed")),
                what=f"{work.rounds + 1} rounds",
                patience=work.timeout,
                lasting=[link, *nodes],
                passing=[submission],
            )
        if failures := notes.read("failed"):
            raise RunError(f"the ServerApp failed: {failures[0]['reason']}")
        if any(note["answered"] != work.clients for note in notes.read("committed")):
            raise RunError("some rounds were aggregated from fewer than all clients")
        total = await traffic(programs, environment)
    return measurement(
        version=version,
        transport=f"{'HTTP' if http else 'gRPC'} with TLS, nodes not authenticated",
        launched=launched,
        notes=notes,
        memory=memory,
        bytes_per_client=total / work.clients / (work.rounds + 1),
    )


async def traffic(programs: Programs, environment: Sequence[str]) -> int:
    """Return the bytes between SuperLink and SuperNodes, as Flower counts them."""
    listing = await programs.start(
        "list", ["flwr", "list", CONNECTION, "--format", "json"], environment
    )
    if await listing.ended():
        raise listing.exit_reason()
    output = programs.log("list")
    counted = json.loads(output[output.index("{") :])["runs"][0]["network-traffic"]
    return int(counted["total-bytes"])
