"""How a demo uses the machine."""

from __future__ import annotations

import pytest

from potluck.client.training.processes.worker_count import BYTES_PER_WORKER
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
def test_hosts_share_what_the_machine_has(
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
