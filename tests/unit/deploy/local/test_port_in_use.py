"""A coordinator whose port another process uses: its start fails at once, with cause and remedy."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.programs import run_program

from potluck.common.errors import UnreachableError
from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation

OPTIONS = DemoOptions(
    task="digits",
    clients=4,
    hosts=1,
    selector="uniform",
    strategy="fedavg",
    count=2,
    rounds=1,
    seed=1,
    device="cpu",
)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[DemoFiles]:
    """Return the files of a federation whose coordinator's port is in use."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield write_demo_files(tmp_path / "demo", OPTIONS, other.getsockname()[1])


def refusal(files: DemoFiles) -> str:
    return (
        f"can't listen on {files.operator.coordinator}: the port is in use; stop the process that "
        "listens there, or choose another with `listen` or --listen"
    )


async def test_local_federation_with_a_port_in_use_starts_no_process(files: DemoFiles) -> None:
    async with LocalFederation(files) as federation:
        with pytest.raises(UnreachableError) as raised:
            await federation.start()
        assert raised.value.message == refusal(files)
        assert not federation.processes


def test_coordinator_with_a_port_in_use_ends_before_it_opens_its_state(files: DemoFiles) -> None:
    command = ("potluck-server", "--config", str(files.coordinator), "--log-format", "console")
    ended = run_program(*command, folder=files.folder)
    assert ended.returncode == 1
    assert ended.stderr.decode().splitlines()[-1] == f"potluck-server: {refusal(files)}"
    assert not (files.folder / "coordinator").exists()
