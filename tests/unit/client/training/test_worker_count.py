"""Default number of processes that train side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from potluck.client.config import ClientConfig
from potluck.client.training.processes import worker_count
from potluck.client.training.processes.worker_count import (
    BYTES_PER_GPU_WORKER,
    BYTES_PER_WORKER,
    WorkerPlan,
    automatic,
    planned_workers,
)


@pytest.mark.parametrize(
    ("clients", "threads", "processors", "memory", "expected"),
    [
        (100, 1, 8, 64, 8),
        (100, 4, 8, 64, 2),
        (3, 1, 8, 64, 3),
        (100, 1, 8, 2, 2),
        (1, 1, 1, 0, 1),
        (100, 16, 8, 64, 1),
    ],
)
def test_worker_count_is_limited_by_processors_clients_and_memory(
    clients: int, threads: int, processors: int, memory: int, expected: int
) -> None:
    found = automatic(clients, threads, processors=processors, memory=memory * BYTES_PER_WORKER)
    assert found == expected


def config(**values: Any) -> ClientConfig:
    tls = {"certificate": "host.pem", "key": "host.key", "authority": "authority.pem"}
    return ClientConfig.model_validate(
        {
            "coordinator": "127.0.0.1:7443",
            "clients": ["client-0:99"],
            "state_directory": "state",
            "tls": tls,
            **values,
        }
    )


@pytest.mark.parametrize(
    ("values", "gpu", "visible", "expected"),
    [
        ({}, True, None, WorkerPlan(count=1)),
        ({"workers": 3, "device": "cuda:0,cuda:1"}, True, None, WorkerPlan(count=6)),
        ({"workers": "auto", "device": "cpu"}, True, None, WorkerPlan(count=16)),
        ({"workers": "auto"}, False, None, WorkerPlan(count=16)),
        ({"workers": "auto"}, True, "", WorkerPlan(count=16)),
        ({"workers": "auto"}, True, "0", WorkerPlan(count=1, most_on_gpu=10)),
        ({"workers": "auto", "threads": 4}, True, None, WorkerPlan(count=1, most_on_gpu=4)),
        (
            {"workers": "auto", "device": "cuda:0,cuda:1"},
            False,
            None,
            WorkerPlan(count=2, most_on_gpu=5),
        ),
        (
            {"workers": "auto", "clients": ["client-0"]},
            True,
            None,
            WorkerPlan(count=1),
        ),
    ],
)
def test_worker_count_is_measured_on_a_gpu_and_computed_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    values: dict[str, Any],
    gpu: bool,
    visible: str | None,
    expected: WorkerPlan,
) -> None:
    monkeypatch.setattr(worker_count, "available_processors", lambda: 16)
    monkeypatch.setattr(worker_count, "available_memory", lambda: 10 * BYTES_PER_GPU_WORKER)
    monkeypatch.setattr(worker_count, "_GPUS", (tmp_path if gpu else tmp_path / "none",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = planned_workers(config(**values))
    assert found == expected
    assert found.needs_processes is (expected != WorkerPlan(count=1))
