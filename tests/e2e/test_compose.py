"""docker-compose.yml on a real Docker engine: build, start, kills, monitoring and removal.

Grafana is not started: its dashboards' queries go to the real Prometheus instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import grpc.aio
import pytest
import yaml
from support.prometheus import Prometheus, check_shown, hurried_config

from potluck.common.net.build_version import RELEASE, software_version
from potluck.common.net.identity import Role
from potluck.common.net.tls import TlsFiles, channel
from potluck.deploy.pki import authority as pki
from potluck.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
BASE_IMAGES = ("python:3.11-slim-bookworm", COMPOSE["services"]["prometheus"]["image"])
SERVICES = ("pki", "coordinator", "host-0", "host-1", "host-2", "operator", "prometheus")
TAG = "under-test"
PATIENCE_SECONDS = 180.0
NO_DATA_HERE = {
    "potluck_model_measure_over_clients": "where clients measure, and the run shows the spread",
    "potluck_model_measuring_": "likewise",
    "potluck_host_gpu_": "on machines with an NVIDIA GPU",
    "potluck_relay_": "where hosts are behind a relay",
    "potluck_sink_": "where the configuration has sinks",
    "potluck_object_store_up": "where files go through an object store",
    "potluck:member_records_left_seconds": "where the federation has a root",
    "potluck_secure_aggregation_phase_seconds_bucket": "once something is summed securely",
    "potluck_privacy_trainings_": "where updates have noise",
    "potluck_privacy_near_limit_clients": "where updates have noise",
    "potluck_privacy_refused_clients": "where updates have noise",
    "potluck_host_privacy_near_limit_clients": "where updates have noise",
    "potluck:trainings_privacy_spent:ratio": "where updates have noise",
}
RUN = """
name = "{name}"
rounds = 100000
clients_per_round = 9
expected_clients = 24
[task]
name = "colored-digits"
clients = 24
[training]
epochs = 20
[round]
grace_seconds = 30
[selector]
name = "{selector}"
"""


def output(*command: str, timeout: float = 60, input_: str | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout, input=input_,
        cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def succeeds(*command: str, timeout: float = 60) -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, check=False, timeout=timeout)
        return done.returncode == 0
    return False


def compose_program() -> list[str]:
    """Return the command of version 2, else of version 1; empty if neither is installed."""
    if succeeds("docker", "compose", "version"):
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


def require_engine(*images: str) -> None:
    """Skip the test, with the reason, if a test of these images can't run."""
    if not succeeds("docker", "info"):
        pytest.skip("no Docker engine answers")
    if not compose_program():
        pytest.skip("there is neither docker compose nor docker-compose")
    for image in images:
        here = succeeds("docker", "image", "inspect", image)
        if not here and not succeeds("docker", "pull", "-q", image, timeout=300):
            pytest.skip(f"image {image} is not on the engine and can't be pulled")


def test_compose_files_are_valid_and_publish_on_loopback_only() -> None:
    program = compose_program()
    if not program:
        pytest.skip("there is neither docker compose nor docker-compose")
    gpu = "deploy/assets/compose/docker-compose.gpu.yml"
    text = output(*program, "-f", "docker-compose.yml", "-f", gpu, "config")
    services = yaml.safe_load(text)["services"]
    assert set(services) == {*SERVICES, "grafana"}
    for name in ("host-0", "host-1", "host-2"):
        assert services[name]["deploy"]["resources"]["reservations"]["devices"]
    for name in ("coordinator", "host-0", "operator", "pki", "prometheus", "grafana"):
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
    published = {name for name, service in services.items() if service.get("ports")}
    assert published == {"coordinator", "grafana"}
    assert "version" not in COMPOSE
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)


@dataclass(frozen=True, kw_only=True)
class Project:
    """A compose project."""

    name: str
    override: Path
    environment: dict[str, str]

    def compose(self, *arguments: str, timeout: float = 300, input_: str | None = None) -> str:
        files = ("-f", str(ROOT / "docker-compose.yml"), "-f", str(self.override))
        done = subprocess.run(
            [*compose_program(), *files, "-p", self.name, "--project-directory", str(ROOT),
             *arguments],
            capture_output=True, text=True, check=False, timeout=timeout, input=input_,
            env=os.environ | self.environment,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def container(self, service: str) -> str:
        return self.compose("ps", "-q", service).strip().splitlines()[0]

    def inspect(self, service: str) -> dict[str, Any]:
        [found] = json.loads(output("docker", "inspect", self.container(service)))
        return dict(found)

    async def until_healthy(self, service: str) -> None:
        """Wait until the health check of a service succeeds; it is made every ten seconds."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.inspect(service)["State"]["Health"]["Status"] != "healthy":  # noqa: ASYNC110  # no signal
                await asyncio.sleep(0.5)

    def potluck(self, *arguments: str, input_: str | None = None) -> str:
        return self.compose("run", "--rm", "-T", "operator", *arguments, input_=input_)

    def included(self, clients: range) -> int:
        """Return the number of times that updates of these clients became part of a model."""
        wanted = {f"client-{number}" for number in clients}
        found = json.loads(self.potluck("clients", "--json"))["clients"]
        return sum(entry["included"] for entry in found if entry["client"] in wanted)

    async def until_training(self) -> None:
        """Wait until clients train in a round."""
        files = ("-f", str(ROOT / "docker-compose.yml"), "-f", str(self.override))
        process = await asyncio.create_subprocess_exec(
            *compose_program(), *files, "-p", self.name, "--project-directory", str(ROOT),
            *("run", "--rm", "-T", "operator", "watch", "--json"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | self.environment, limit=1 << 22,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for line in process.stdout:
                    event = json.loads(line)
                    if event.get("event") == "progress" and event["phase"] == "train":
                        return
        finally:
            process.terminate()
            await process.wait()
        raise AssertionError("the run ended before it trained")


@contextlib.contextmanager
def built(*targets: str) -> Iterator[None]:
    """Build images as the compose file does."""
    require_engine(BASE_IMAGES[0])
    names = [f"potluck/{target}:{TAG}" for target in targets]
    for target, name in zip(targets, names, strict=True):
        # Use the host's network: some Docker engines have no default bridge.
        output(
            "docker", "build", "--network", "host", "--target", target, "-t", name,
            "-f", "deploy/assets/images/Dockerfile", "--build-arg", "TORCH_INDEX=",
            "--build-arg", f"VERSION={software_version()}", ".",
            timeout=1500,
        )  # fmt: skip
    yield
    succeeds("docker", "image", "rm", "-f", *names)


@pytest.fixture(scope="module")
def relay_image() -> Iterator[None]:
    with built("relay"):
        yield


@pytest.fixture(scope="module")
def images(relay_image: None) -> Iterator[None]:
    """Build all images."""
    require_engine(*BASE_IMAGES)
    with built("coordinator", "client", "operator"):
        yield


@pytest.mark.slow
@pytest.mark.timeout(2400)  # the first test that needs the images also builds them
@pytest.mark.parametrize("target", ["relay", "coordinator", "client", "operator"])
def test_image_reports_its_version_and_is_labelled_with_it(images: None, target: str) -> None:
    name = f"potluck/{target}:{TAG}"
    told = output("docker", "run", "--rm", "--network", "none", name, "--version").split()
    assert told[-1] == software_version()
    [found] = json.loads(output("docker", "image", "inspect", name))
    label = found["Config"]["Labels"]["org.opencontainers.image.version"]
    assert label == software_version()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_image_built_without_a_version_reports_a_digest_of_its_sources() -> None:
    require_engine(BASE_IMAGES[0])
    name = f"potluck/version:{TAG}"
    output(
        "docker", "build", "--network", "host", "--target", "version", "-t", name,
        "-f", "deploy/assets/images/Dockerfile", ".", timeout=600,
    )  # fmt: skip
    try:
        told = output("docker", "run", "--rm", "--network", "none", name, "cat", "version")
    finally:
        succeeds("docker", "image", "rm", "-f", name)
    assert re.fullmatch(rf"{re.escape(RELEASE)}\.dev0\+s[0-9a-f]{{9}}", told.strip())


@contextlib.contextmanager
def project_files() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the compose project's files, changed for the test: Prometheus's port is published, it
    scrapes often, and rounds take seconds."""
    with tempfile.TemporaryDirectory(prefix="potluck-compose-") as name:
        folder = Path(name)
        shipped = yaml.safe_load((ROOT / "deploy/assets/prometheus/prometheus.yml").read_text())
        watched = folder / "prometheus"
        watched.mkdir()
        hurried_config(watched, shipped["scrape_configs"], rules="/etc/prometheus/rules")
        (folder / "run.toml").write_text(RUN.format(name="first", selector="fedentopt"))
        override = {
            "services": {
                "prometheus": {
                    "ports": ["127.0.0.1::9090"],
                    "volumes": [f"{watched}:/etc/prometheus:ro"],
                },
                "operator": {"volumes": [f"{folder / 'run.toml'}:/etc/potluck/run.toml:ro"]},
            }
        }
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # readable for Prometheus's own user
        yield folder, override


@contextlib.asynccontextmanager
async def up() -> AsyncIterator[tuple[Project, Prometheus]]:
    with project_files() as (folder, override):
        path = folder / "override.yml"
        path.write_text(yaml.safe_dump(override))
        environment = {"POTLUCK_TAG": TAG, "POTLUCK_PORT": "0", "POTLUCK_TORCH_INDEX": ""}
        project = Project(
            name=f"potluck-test-{os.getpid()}", override=path, environment=environment
        )
        try:
            project.compose("up", "-d", "--no-build", *SERVICES)
            address = project.compose("port", "prometheus", "9090").strip()
            prometheus = Prometheus(address)
            await prometheus.until("vector(1)")
            yield project, prometheus
        except BaseException:
            print(project.compose("logs", "--tail", "40"))
            raise
        finally:
            project.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
            assert not output("docker", "ps", "-aq", "--filter", f"name={project.name}")
            assert not output("docker", "volume", "ls", "-q", "--filter", f"name={project.name}")
            assert not output("docker", "network", "ls", "-q", "--filter", f"name={project.name}")


def run_in(image: str, code: str) -> str:
    return output(
        "docker", "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp",  # noqa: S108  of the container
        "--entrypoint", "python", f"potluck/{image}:{TAG}", "-c", code,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("images")
class TestImages:
    def test_client_image_contains_no_coordinator_code(self) -> None:
        found = run_in(
            "client",
            "import importlib.util as u, os, pathlib\n"
            "print([u.find_spec('potluck.' + n) is not None "
            "for n in ('client', 'common', 'server', 'deploy')])\n"
            "print(sorted(os.listdir('/opt/code/potluck')), sorted(os.listdir('/opt/code/bin')))",
        )
        held = [
            *("client", "common", "experiments", "integrations"),
            *("privacy", "rpc", "secagg", "verifiable"),
        ]
        assert found.splitlines() == [
            "[True, True, False, False]",
            f"{held} ['potluck-client']",
        ]

    @pytest.mark.parametrize("image", ["coordinator", "client", "operator", "relay"])
    def test_containers_run_as_a_user_without_write_access(self, image: str) -> None:
        code = (
            "import os, pathlib\n"
            "print(os.getuid())\n"
            "for folder in ('/', '/opt/code', '/etc/potluck', '/var/lib/potluck'):\n"
            "    try: pathlib.Path(folder, 'x').touch()\n"
            "    except OSError: continue\n"
            "    print('wrote to', folder)"
        )
        assert run_in(image, code).split() == ["10001"]

    async def test_compose_federation_trains_survives_kills_and_is_monitored(self) -> None:
        async with up() as (project, prometheus):
            await prometheus.until("potluck_run_committed_rounds >= 5")
            await prometheus.until_up({"potluck-coordinator": 1, "potluck-host": 3})
            for service in ("coordinator", "host-0", "host-1", "host-2"):
                await project.until_healthy(service)
                assert project.inspect(service)["HostConfig"]["ReadonlyRootfs"]
            await a_host_is_killed(project, prometheus)
            await the_coordinator_is_killed(project, prometheus)
            project.potluck("run", "-", input_=RUN.format(name="second", selector="feddiverse"))
            await check_shown(prometheus, excused=NO_DATA_HERE)


async def a_host_is_killed(project: Project, prometheus: Prometheus) -> None:
    """Kill a host during a round; check that it takes part again after a restart."""
    container = project.container("host-1")
    await project.until_training()
    output("docker", "kill", container)
    await prometheus.until_firing("PotluckHostDown", "PotluckHostsLost")
    before = project.included(range(8, 16))
    output("docker", "start", container)
    await prometheus.until_resolved("PotluckHostDown", "PotluckHostsLost")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while project.included(range(8, 16)) <= before:  # noqa: ASYNC110  # no signal
            await asyncio.sleep(0.5)


async def the_coordinator_is_killed(project: Project, prometheus: Prometheus) -> None:
    """Kill the coordinator during a round; check that it resumes after a restart."""
    container = project.container("coordinator")
    await project.until_training()
    committed = await prometheus.value("potluck_run_committed_rounds")
    output("docker", "kill", container)
    await prometheus.until_firing("PotluckCoordinatorDown")
    output("docker", "start", container)
    await prometheus.until_resolved("PotluckCoordinatorDown")
    await prometheus.until("potluck_runs_resumed_total == 1")
    await prometheus.until(f"potluck_run_committed_rounds > {committed}")


# A relay -----------------------------------------------------------------------------------------

RELAY = """
coordinator = "127.0.0.1:9"
listen = "0.0.0.0:7443"
state_directory = "/var/lib/potluck/relay"
[tls]
certificate = "/pki/relay/gate.pem"
key = "/pki/relay/gate.key"
authority = "/pki/relay/authority.pem"
"""


def relay_folder() -> tuple[Path, TlsFiles]:
    """Return a relay's folder as docs/deploy/relays.md describes it, and a host's certificate
    files."""
    folder = Path(tempfile.mkdtemp(prefix="potluck-relay-"))
    pki.create_authority(folder / "pki", "demo")
    clients = ["client-0:3"]
    pki.issue(folder / "pki", Role.RELAY, "gate", clients=clients, hosts=["127.0.0.1"])
    host = pki.issue(folder / "pki", Role.HOST, "lab-a", clients=clients)
    (folder / "relay.toml").write_text(RELAY)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # readable for the relay's own user
    tls = TlsFiles(certificate=host.certificate, key=host.key, authority=host.authority)
    return folder, tls


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("relay_image")
async def test_relay_compose_file_starts_a_relay() -> None:
    """The relay reports to its hosts that the coordinator is unreachable."""
    folder, tls = relay_folder()
    file = ROOT / "deploy/assets/compose/docker-compose.relay.yml"
    compose = (*compose_program(), "-f", str(file), "-p", f"potluck-test-relay-{os.getpid()}")
    values = {"TAG": TAG, "RELAY_PORT": "0", "RELAY_FOLDER": str(folder)}
    with mock.patch.dict(os.environ, {f"POTLUCK_{name}": text for name, text in values.items()}):
        try:
            output(*compose, "up", "-d", timeout=120)
            port = output(*compose, "port", "relay", "7443").strip().rpartition(":")[2]
            await until_relayed(f"127.0.0.1:{port}", tls)
        finally:
            print(output(*compose, "logs", "--tail", "40"))
            output(*compose, "down", "--volumes", "--timeout", "5", timeout=120)
            shutil.rmtree(folder)


async def until_relayed(address: str, tls: TlsFiles) -> None:
    """Wait until a relay reports to a host that its coordinator can't be reached."""
    request = coordinator_pb2.LocateUploadRequest(
        client_id="client-0", run_id="run", update_id="run/1.1/client-0", blake3="0" * 64
    )
    said = ""
    async with channel(address, tls) as connection, asyncio.timeout(PATIENCE_SECONDS):
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
            coordinator_pb2_grpc.CoordinatorServiceStub(connection)
        )
        while "127.0.0.1:9" not in said:
            await asyncio.sleep(0.2)  # the container may still be starting
            try:
                await stub.LocateUpload(request)
            except grpc.aio.AioRpcError as error:
                said = error.details() or ""
