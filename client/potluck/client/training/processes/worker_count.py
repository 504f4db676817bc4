"""How many processes of a host train side by side."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from potluck.client.config import ClientConfig
from potluck.common.process.capacity import available_memory, available_processors

BYTES_PER_WORKER: Final = 400 * 2**20
"""Memory of a process with torch and a small model, generously."""
BYTES_PER_GPU_WORKER: Final = 3 * 2**30
"""Memory of the machine, not of the GPU, that a process takes that uses one, generously."""
_GPUS: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvhost-ctrl"))
"""What there is where CUDA can be: with NVIDIA's driver, under WSL, on Jetson. Asking CUDA itself
would keep processes that are forked afterwards from using it."""


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """count: worker processes over all devices to begin with; 1 for none beside the host's own.
    most_on_gpu: that each GPU may have, where that is to be measured; else 1."""

    count: int
    most_on_gpu: int = 1

    @property
    def needs_processes(self) -> bool:
        """Whether there are worker processes beside the host's own."""
        return self.count > 1 or self.most_on_gpu > 1


def planned_workers(config: ClientConfig) -> WorkerPlan:
    """The workers of a host, as its configuration and its machine have it.

    Raises ConfigurationError for malformed or repeated clients.
    """
    devices = len(config.device.split(","))
    if config.workers != "auto":
        return WorkerPlan(count=config.workers * devices)
    if may_use_gpu(config.device):
        return WorkerPlan(count=devices, most_on_gpu=most_on_gpu(config))
    return WorkerPlan(count=workers_on_cpu(config))


def may_use_gpu(device: str) -> bool:
    """Whether a host with this setting trains on a GPU, as far as can be seen from outside."""
    if device != "auto":
        return device != "cpu"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible not in ("", "-1") and any(path.exists() for path in _GPUS)


def workers_on_cpu(config: ClientConfig) -> int:
    """Worker processes of a host that trains on processors."""
    return automatic(
        len(config.client_ids()),
        config.threads,
        processors=available_processors(),
        memory=available_memory(),
    )


def most_on_gpu(config: ClientConfig) -> int:
    """Worker processes that each GPU may have, by what the machine has beside them."""
    devices = len(config.device.split(","))
    return automatic(
        -(-len(config.client_ids()) // devices),
        config.threads,
        processors=available_processors() // devices,
        memory=available_memory() // devices,
        each=BYTES_PER_GPU_WORKER,
    )


def automatic(
    clients: int, threads: int, *, processors: int, memory: int, each: int = BYTES_PER_WORKER
) -> int:
    """Worker processes that fill the processors, have memory, and find clients; at least 1.

    memory: bytes that may be used. each: bytes that a worker takes.
    """
    return max(1, min(processors // threads, memory // each, clients))
