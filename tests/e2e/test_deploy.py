"""`potluck deploy` against two real Docker engines, each behind an ssh server of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import docker
import pytest
import tomlkit
from rich.console import Console
from support.engines import (
    FIRST_SOCKET,
    IMAGES,
    SecondEngine,
    installation_folder,
    make_broken_image,
    make_images,
    remove_images,
    require_engines,
    second_engine,
    show_as_state,
    ssh_server,
)
from support.repository import ROOT
from typer.testing import CliRunner

from potluck.common.errors import PotluckError, UnreachableError
from potluck.common.net.identity import Role
from potluck.common.net.tls import TlsFiles
from potluck.deploy.commands.deploy_commands import app
from potluck.deploy.local.demo_files import reserved_port
from potluck.deploy.machines.deploy_plan import Step
from potluck.deploy.machines.deployment import Deployment, roll_out
from potluck.deploy.machines.docker_engine import connected, open_engine
from potluck.deploy.machines.inventory import MachineSettings, load_inventory
from potluck.deploy.machines.side_by_side import Say, failures
from potluck.deploy.operator.operator_client import connect
from potluck.deploy.operator.operator_config import OperatorConfig
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki import certificate_register
from potluck.rpc.v1 import operator_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FEDERATION = "deploy-test"
RUN = """
name = "deployed"
rounds = 3
clients_per_round = 4
expected_clients = 4
[task]
name = "digits"
clients = 4
[selector]
name = "uniform"
[strategy]
name = "fedavg"
"""


@dataclass
class Lab:
    """Two machines, and the folder an operator works in."""

    folder: Path
    first: docker.DockerClient
    second: SecondEngine
    address: str

    @property
    def file(self) -> Path:
        return self.folder / "federation.toml"

    def potluck(self, *arguments: str, fails: bool = False) -> str:
        """Run a command; return its standard output, or errors and exception if `fails`."""
        done = CliRunner().invoke(app, [*arguments, "--file", str(self.file)])
        assert (done.exit_code != 0) == fails, (done.output, done.exception)
        return f"{done.stderr}{done.exception}" if fails else done.stdout

    def change(self, host: int, **values: Any) -> None:
        """Change the inventory's host on the second machine; None removes a setting."""
        document = tomlkit.parse(self.file.read_text()).unwrap()
        changed = document["machines"][1]["hosts"][host]
        changed.update(values)
        for name in [name for name, value in changed.items() if value is None]:
            del changed[name]
        self.file.write_text(tomlkit.dumps(document))

    def set(self, **values: Any) -> None:
        """Change the inventory's settings of the whole federation."""
        document = tomlkit.parse(self.file.read_text()).unwrap()
        self.file.write_text(tomlkit.dumps(document | values))

    def containers(self) -> dict[str, Any]:
        """Return the test's containers on both machines, by name."""
        found = {}
        label = f"potluck.federation={FEDERATION}"
        with contextlib.closing(self.second.client()) as second:
            for engine in (self.first, second):
                for each in engine.containers.list(all=True, filters={"label": label}):
                    found[str(each.name)] = each
        return found

    def operator(self) -> OperatorConfig:
        files = pki.issue(self.folder / "pki", Role.OPERATOR, "operator", force=True)
        tls = TlsFiles(certificate=files.certificate, key=files.key, authority=files.authority)
        return OperatorConfig(coordinator=self.address, tls=tls)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    require_engines()
    folder = tmp_path_factory.mktemp("lab")
    first = open_engine(f"unix://{FIRST_SOCKET}")
    with (
        contextlib.ExitStack() as stack,
        installation_folder() as installation,
        second_engine() as second,
        ssh_server(folder / "ssh-1") as door_1,
        ssh_server(folder / "ssh-2") as door_2,
        reserved_port() as port,
        reserved_port() as relay_port,
    ):
        stack.callback(first.close)
        make_images(first)
        stack.callback(remove_images, first)
        ours = {"potluck.federation": FEDERATION}
        show_as_state(first, f"potluck-{FEDERATION}-gate-state", installation, ours)
        address = f"127.0.0.1:{port}"
        gate = {"name": "gate", "address": f"127.0.0.1:{relay_port}", "port": relay_port}
        machines = [
            {
                "name": f"gpu-{number}",
                "engine": door.url,
                "socket": str(socket),
                "ssh_options": list(door.options),
                "network": "host",
                "user": "0:0",
                "labels": {"lab": "north"},
                "relays": relays,
                "hosts": [
                    {
                        "name": f"host-{number}-{letter}",
                        "clients": [f"client-{2 * (number - 1) + index}"],
                        "data_directory": str(installation),
                        "memory": "2g",
                        "settings": {"reconnect_maximum_seconds": 0.5},
                        **({"relay": "gate"} if number == 2 else {}),
                    }
                    for index, letter in enumerate("ab")
                ],
            }
            for number, door, socket, relays in (
                (1, door_1, FIRST_SOCKET, [{**gate, "settings": {"sum_wait_seconds": 1}}]),
                (2, door_2, second.socket, []),
            )
        ]
        inventory = {
            "federation": FEDERATION,
            "address": address,
            "image": dict(zip(("coordinator", "client", "relay"), IMAGES, strict=True)),
            "coordinator": {
                "machine": "gpu-1",
                "port": port,
                "data_directory": str(installation),
                "settings": {"heartbeat_seconds": 0.5},
            },
            "machines": machines,
        }
        (folder / "federation.toml").write_text(tomlkit.dumps(inventory))
        lab = Lab(folder, first, second, address)
        try:
            yield lab
        finally:
            clean(first)  # before the folder that its containers mount is removed


def clean(engine: docker.DockerClient) -> None:
    """Remove everything that a failed test left on the engine."""
    label = f"potluck.federation={FEDERATION}"
    for container in engine.containers.list(all=True, filters={"label": label}):
        container.remove(force=True)
    for volume in engine.volumes.list(filters={"label": label}):
        volume.remove(force=True)


@dataclass(frozen=True, kw_only=True)
class Killing(Deployment):
    """A deployment that kills the second machine's engine when the first container is created
    there."""

    second: SecondEngine | None = None

    def carry_out(self, step: Step, machine: MachineSettings, say: Say) -> Step:
        def overheard(text: str) -> None:
            if machine.name == "gpu-2" and text.startswith("create"):
                assert self.second is not None
                self.second.kill()
            say(text)

        return super().carry_out(step, machine, overheard)


async def train(lab: Lab) -> list[int]:
    """Start a run and return its committed rounds."""
    async with connect(lab.operator()) as operator, asyncio.timeout(400):
        attending = 0
        while attending < 4:
            with contextlib.suppress(UnreachableError):  # the coordinator may still be starting
                attending = sum(client.attending for client in await operator.list_clients())
            await asyncio.sleep(0.1)  # poll: other processes send no signal
        through = {each.host_id: each.relay for each in await operator.list_clients()}
        assert through == {
            **dict.fromkeys(("host-1-a", "host-1-b"), ""),
            **dict.fromkeys(("host-2-a", "host-2-b"), "gate"),
        }
        run_id = await operator.start_run(RUN)
        rounds: list[int] = []
        async for event in operator.watch_run(run_id):
            if event.WhichOneof("event") == "committed":
                rounds.append(event.committed.round)
            assert event.status.state != operator_pb2.RUN_STATE_FAILED, event.status.reason
        return rounds


def test_deploy_creates_changes_and_removes_a_federation_on_two_machines(lab: Lab) -> None:
    # plan changes nothing
    planned = lab.potluck("plan")
    assert "issue a certificate for coordinator" in planned
    assert f"gpu-2: put image {IMAGES[1]}: the machine lacks this image" in planned
    assert planned.count("create potluck-deploy-test-") == 6
    assert lab.containers() == {}
    assert not (lab.folder / "pki").exists()

    # An engine that dies during `up` is reported; the other engines continue.
    inventory = load_inventory(lab.file)
    deployment = Killing.prepared(inventory, inventory.machines, issue=True)
    assert isinstance(deployment, Killing)
    deployment = replace(deployment, second=lab.second)
    done = roll_out(deployment, inventory.machines, Console(quiet=True))
    failed = failures(done.results)
    assert list(failed) == ["gpu-2"], failed
    assert isinstance(failed["gpu-2"], PotluckError)
    assert "no Docker engine answers" in failed["gpu-2"].message
    said = lab.potluck("up", fails=True)  # the engine is still dead
    assert "gpu-1: done" in said
    assert "1 of 2 machines failed: gpu-2" in said

    # The next `up` takes the remaining steps, and repeats none.
    lab.second.start()
    said = lab.potluck("up")
    assert "gpu-1: nothing to do" in said
    assert "gpu-2: create potluck-deploy-test-host-2-a" in said
    before = lab.containers()
    assert len(before) == 6
    assert lab.potluck("up").splitlines() == ["gpu-1: nothing to do", "gpu-2: nothing to do"]
    assert {n: c.id for n, c in lab.containers().items()} == {n: c.id for n, c in before.items()}

    assert asyncio.run(train(lab)) == [1, 2, 3]

    status = json.loads(lab.potluck("status", "--json"))
    assert {each["state"] for each in status} == {"running"}
    assert {each["pending"] for each in status} == {""}
    assert "attending" in lab.potluck("logs", "host-2-b", "--tail", "50")
    assert lab.potluck("restart", "host-2-b") == "restarted potluck-deploy-test-host-2-b\n"

    check_isolation(before)
    check_backup(lab)
    check_changes(lab)
    check_broken_images(lab)
    check_broken_settings(lab)
    check_unfinished_replacement(lab)
    check_down(lab)


def check_isolation(containers: dict[str, Any]) -> None:
    for each in containers.values():
        settings = each.attrs["HostConfig"]
        assert settings["ReadonlyRootfs"]
        assert settings["CapDrop"] == ["ALL"]
        assert settings["RestartPolicy"]["Name"] == "unless-stopped"
        assert settings["LogConfig"]["Config"]["max-size"] == "10m"
        data = [mount for mount in each.attrs["Mounts"] if mount["Destination"] == "/data"]
        assert [mount["RW"] for mount in data] == ([] if "-gate" in str(each.name) else [False])
        assert each.labels["lab"] == "north"
    host = containers["potluck-deploy-test-host-1-a"]
    assert host.attrs["HostConfig"]["Memory"] == 2 << 30
    listed = host.exec_run(["stat", "-c", "%a %u", "/etc/potluck/tls/key.pem", "/etc/potluck/tls"])
    assert listed.output.decode().splitlines() == ["440 0", "550 0"]


def check_backup(lab: Lab) -> None:
    """Back up a running coordinator in its container with the page's commands."""
    page = (ROOT / "docs/operate/backup.md").read_text()
    commands = re.findall(r"^\$ (docker (?:exec|cp) .*backup-1.*)$", page, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        typed = shlex.split(command.replace("potluck-demo-", "potluck-deploy-test-"))
        ended = subprocess.run(typed, cwd=lab.folder, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
    listed = json.loads((lab.folder / "backup-1" / "backup.json").read_text())
    assert any(name.startswith("state/models/") for name in listed["files"])


def check_changes(lab: Lab) -> None:
    """Check that `up` changes only what differs from the inventory."""
    before = lab.containers()
    certificate_register.renew(lab.folder / "pki", "host-2-a")
    assert "refresh certificates potluck-deploy-test-host-2-a" in lab.potluck("plan")
    lab.change(1, cpus=1.5)
    done = lab.potluck("up").splitlines()
    assert done == [
        "gpu-1: nothing to do",
        (
            "gpu-2: refresh certificates potluck-deploy-test-host-2-a: "
            "the container's certificates differ from the inventory"
        ),
        "gpu-2: replace potluck-deploy-test-host-2-b: the inventory has other options",
    ]
    after = lab.containers()
    changed = {name for name, each in before.items() if after[name].id != each.id}
    assert changed == {"potluck-deploy-test-host-2-b"}
    refreshed = "potluck-deploy-test-host-2-a"
    started = [each[refreshed].attrs["State"]["StartedAt"] for each in (before, after)]
    assert started[0] == started[1]
    assert lab.potluck("up").splitlines() == ["gpu-1: nothing to do", "gpu-2: nothing to do"]


def check_broken_images(lab: Lab) -> None:
    """Check that the roll-out stops at the first host and restores its container."""
    before = lab.containers()
    lab.change(0, cpus=1.5)  # a host of the second machine, which the roll-out does not reach
    image = IMAGES[1]
    script = "#!/bin/sh\necho 'no such option: --frobnicate'\nexit 3\n"
    make_broken_image(lab.first, image, script)
    said = lab.potluck("up", fails=True)
    assert (
        f"host host-1-a did not connect with image {image}: the container's program ended with"
        in said
    )
    assert "exit code 3; its log ends with: no such option: --frobnicate" in said
    assert "the previous container was restored" in said
    assert "1 of 2 machines failed: gpu-1" in said, said
    check_same(lab, before)

    make_broken_image(lab.first, image, "")
    said = lab.potluck("up", fails=True)
    assert f"host host-1-a can't start with image {image}: " in said
    assert '"potluck-client": executable file not found' in said
    check_same(lab, before)

    # A container that runs and does not connect.
    make_broken_image(lab.first, image, "#!/bin/sh\necho 'thinking'\nexec sleep 1000\n")
    lab.set(connect_seconds=5)
    said = lab.potluck("up", fails=True)
    assert (
        "no connection after 5 s; its log ends with: thinking; the previous container was restored"
        in said
    )
    check_same(lab, before)

    lab.set(connect_seconds=180)
    make_images(lab.first)
    lab.change(0, cpus=None)
    assert lab.potluck("up").splitlines() == [
        "gpu-1: nothing to do",
        f"gpu-2: put image {image}: the machine has another image with this name",
    ]
    check_same(lab, before)


def check_same(lab: Lab, before: dict[str, Any]) -> None:
    """Check that all containers are the same as before, run, and report that they are connected."""
    found = lab.containers()
    assert {name: each.id for name, each in found.items()} == {
        name: each.id for name, each in before.items()
    }
    assert {each.status for each in found.values()} == {"running"}
    asyncio.run(all_attend(lab))


async def all_attend(lab: Lab) -> None:
    async with connect(lab.operator()) as operator, asyncio.timeout(200):
        while sum(c.attending for c in await operator.list_clients()) < 4:  # noqa: ASYNC110  # no signal
            await asyncio.sleep(0.1)


def check_broken_settings(lab: Lab) -> None:
    """Check that a configuration that its program refuses is rolled back."""
    before = lab.containers()
    settings = {"reconnect_maximum_seconds": 0.5}
    lab.change(0, settings={**settings, "no_such_setting": True})
    said = lab.potluck("up", fails=True)
    assert "host host-2-a did not connect with image" in said
    assert "no_such_setting" in said
    assert "the container's previous files were restored" in said
    check_same(lab, before)
    lab.change(0, settings=settings)
    assert lab.potluck("up").splitlines() == ["gpu-1: nothing to do", "gpu-2: nothing to do"]


def check_unfinished_replacement(lab: Lab) -> None:
    """Check that `up` resumes after it was killed between two containers."""
    names = lab.containers().keys()
    host = "potluck-deploy-test-host-1-b"
    old = lab.containers()[host]
    old.stop(timeout=15)
    old.rename(f"{host}-before")
    assert lab.potluck("up").splitlines() == [
        f"gpu-1: replace {host}: an earlier replacement was not finished",
        "gpu-2: nothing to do",
    ]
    found = lab.containers()
    assert found.keys() == names
    assert found[host].id != old.id
    asyncio.run(all_attend(lab))


def check_down(lab: Lab) -> None:
    """Check that `down` removes everything of the test and nothing else."""
    with contextlib.closing(lab.second.client()) as engine:
        engine.volumes.create("somebody-elses", labels={"potluck.federation": "another"})
        foreign = engine.containers.create(
            IMAGES[1], ["potluck-client"], name="potluck-other-host", labels={"lab": "north"}
        )
        lab.potluck("down", "--yes")
        assert lab.containers() == {}
        for client in (lab.first, engine):
            ours = {"label": f"potluck.federation={FEDERATION}"}
            assert client.volumes.list(filters=ours) == []
        assert [volume.name for volume in engine.volumes.list()] == ["somebody-elses"]
        assert [each.id for each in engine.containers.list(all=True)] == [foreign.id]
        tags = {tag for image in engine.images.list() for tag in image.tags}
        assert tags == {IMAGES[1]}  # `up` put it there, but a foreign container uses it now
        assert lab.potluck("down", "--yes") == ""
        assert lab.potluck("plan").count("create") == 6
        foreign.remove()


def test_unreachable_machine_or_docker_engine_is_an_error_with_the_reason(lab: Lab) -> None:
    [machine, *_] = load_inventory(lab.file).machines
    stranger = machine.model_copy(update={"ssh_options": machine.ssh_options[2:]})
    refused = pytest.raises(PotluckError, match=r"over ssh: .*Permission denied")
    with refused, connected(stranger):
        pytest.fail("it let a stranger in")
    elsewhere = machine.model_copy(update={"socket": "/run/no-engine.sock"})
    missing = pytest.raises(PotluckError, match=r"no Docker engine answers at /run/no-engine\.sock")
    with missing, connected(elsewhere):
        pytest.fail("there is no engine")
