"""A demo's use of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from potluck.client.training.processes.worker_count import BYTES_PER_WORKER
from potluck.common.errors import ConfigurationError
from potluck.deploy.cli import app
from potluck.deploy.commands import demo_command
from potluck.deploy.commands.demo_command import workers_of_host


@pytest.mark.parametrize(
    ("device", "clients", "hosts", "processors", "memory", "expected"),
    [
        ("cpu", 24, 4, 8, 64, 2),
        ("cpu", 6, 2, 64, 64, 3),
        ("cpu", 24, 2, 64, 6, 3),
        ("cpu", 24, 4, 2, 64, 1),
        ("cuda:0", 24, 1, 16, 64, 1),
        ("auto", 24, 1, 16, 64, 1),
    ],
)
def test_demo_hosts_share_the_processors_and_memory_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    clients: int,
    hosts: int,
    processors: int,
    memory: int,
    expected: int,
) -> None:
    monkeypatch.setattr(demo_command, "available_processors", lambda: processors)
    monkeypatch.setattr(demo_command, "available_memory", lambda: memory * BYTES_PER_WORKER)
    assert workers_of_host(device, clients, hosts) == expected


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--device", "cuda:99"], r"this machine does not have the device cuda:99; choose"),
        (["--device", "gpu"], "device is 'gpu'; it must be 'cpu', 'auto', 'cuda:0'"),
        (["--task", "mnist"], r"task mnist reads mnist\.npz from a data directory, but no data"),
        (["--task", "mnist", "--data", "."], r"task mnist needs .*mnist\.npz: No such file"),
        (["-o", "secure_aggregation=true"], "on 5 hosts, but the demo has 4; add --hosts 5"),
        (
            ["--hosts", "2", "-o", "secure_aggregation=true", "-o", "masking.hosts=3"],
            "on 3 hosts, but the demo has 2; add --hosts 3",
        ),
        (["--data", "nowhere"], "nowhere is not a folder; name an existing folder with --data"),
    ],
)
def test_demo_options_this_machine_can_not_meet_are_refused_without_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=why) as caught:
        CliRunner().invoke(app, ["demo", *arguments], catch_exceptions=False)
    assert "\n" not in caught.value.message
    assert list(tmp_path.iterdir()) == []
