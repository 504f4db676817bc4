"""The number of a host's processes that train side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from potluck.client.config import ClientConfig
from potluck.client.training.kept_choices import KeptChoice
from potluck.common.process.capacity import available_memory, available_processors

if TYPE_CHECKING:
    import torch

# Processes that share a GPU -----------------------------------------------------------------------

SHARE_OF_FREE: Final = 0.9
"""Usable share of the free memory; the remaining share covers differences between clients."""
_GIBIBYTE: Final = 2**30
CONTEXT_BYTES: Final = 600 * 2**20
"""GPU memory of a process before its first tensor, a generous estimate.

It can't be measured: neither the driver nor torch reports it if other processes use the GPU.
"""


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """GPU memory of a training, in bytes.

    peak: maximum memory that torch's allocator held for tensors. context: all other GPU memory of
    the process. free: memory that this process and further workers may use together.
    """

    peak: int
    context: int
    free: int


def memory_taken(device: torch.device, train: Callable[[], None]) -> TrainingMemory:
    """Run a training on a GPU and measure its memory. Raises what the training raises."""
    import torch  # only the processes that train import it

    torch.cuda.synchronize(device)
    free_before, _ = torch.cuda.mem_get_info(device)
    held_before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    train()
    torch.cuda.synchronize(device)
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    # Memory outside torch's allocator: the first training loads CUDA kernels and library
    # workspaces.
    loaded = max(0, (free_before - free) - (held - held_before))
    context = CONTEXT_BYTES + loaded
    peak = torch.cuda.max_memory_reserved(device)
    return TrainingMemory(peak=peak, context=context, free=free + held + context)


class WorkerChoice(KeptChoice):
    """The chosen number of workers that share a GPU, with the values that decided it.

    peak, context, free: see `TrainingMemory`. lanes: clients per training if all are trained
    together. most: maximum number of workers for the machine's processors and memory.
    """

    peak: int
    context: int
    free: int
    lanes: int
    most: int
    workers: int

    @property
    def reason(self) -> str:
        """The reason for the choice, for people."""
        if not self.free:
            return "the memory of a training can't be measured"
        peak, context, free = (
            f"{each / _GIBIBYTE:.2f} GiB" for each in (self.peak, self.context, self.free)
        )
        many = f" of up to {self.lanes} clients" if self.lanes > 1 else ""
        return (
            f"a client's training needs {peak} of GPU memory and its process another {context}; "
            f"{free} are free. At most {self.most} trainings{many} run at once"
        )


def chosen_workers(
    subject: str, memory: TrainingMemory | None, *, lanes: int, most: int
) -> WorkerChoice:
    """Choose as many workers, up to `most`, as fit in memory; 1 if nothing could be measured.

    Each worker trains its share of the clients that are trained together; there is at least one
    worker. subject: everything that the choice depends on, as text. lanes: number of clients that
    are trained together, at least 1. most: maximum number of workers, at least 1.
    """
    known = memory or TrainingMemory(peak=0, context=0, free=0)
    return WorkerChoice(
        subject=subject,
        peak=known.peak,
        context=known.context,
        free=known.free,
        lanes=lanes,
        most=most,
        workers=1 if memory is None else workers_within(memory, lanes=lanes, most=most),
    )


def workers_within(memory: TrainingMemory, *, lanes: int, most: int) -> int:
    """Return the maximum number of workers, from 1 to `most`, that fit in memory together."""
    there = SHARE_OF_FREE * memory.free
    for workers in range(most, 1, -1):
        clients = -(-lanes // workers)
        if workers * (memory.context + clients * memory.peak) <= there:
            return workers
    return 1


# The plan -----------------------------------------------------------------------------------------

BYTES_PER_WORKER: Final = 400 * 2**20
"""Memory of a process with torch and a small model, a generous estimate."""
BYTES_PER_GPU_WORKER: Final = 3 * 2**30
"""Main memory, not GPU memory, of a process that uses a GPU, a generous estimate."""
_GPUS: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvhost-ctrl"))
"""Paths that exist if CUDA may be available: with NVIDIA's driver, under WSL, on Jetson.

The code checks paths and doesn't call CUDA, since forked processes could not use CUDA after such a
call.
"""


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """The planned workers of a host.

    count: worker processes at the start, over all devices; 1 means only the host's own process.
    most_on_gpu: maximum per GPU if their number will be measured; else 1."""

    count: int
    most_on_gpu: int = 1

    @property
    def needs_processes(self) -> bool:
        """True if there are worker processes in addition to the host's own process."""
        return self.count > 1 or self.most_on_gpu > 1


def planned_workers(config: ClientConfig) -> WorkerPlan:
    """Return the workers of a host, by its configuration and its machine.

    Raises ConfigurationError for malformed or repeated clients.
    """
    devices = len(config.device.split(","))
    if config.workers != "auto":
        return WorkerPlan(count=config.workers * devices)
    if may_use_gpu(config.device):
        return WorkerPlan(count=devices, most_on_gpu=most_on_gpu(config))
    return WorkerPlan(count=workers_on_cpu(config))


def may_use_gpu(device: str) -> bool:
    """Return True if a host with this setting may train on a GPU; does not call CUDA."""
    if device != "auto":
        return device != "cpu"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible not in ("", "-1") and any(path.exists() for path in _GPUS)


def workers_on_cpu(config: ClientConfig) -> int:
    """Return the number of worker processes of a host that trains on CPUs."""
    return automatic(
        len(config.client_ids()),
        config.threads,
        processors=available_processors(),
        memory=available_memory(),
    )


def most_on_gpu(config: ClientConfig) -> int:
    """Return the maximum number of worker processes per GPU.

    The machine's processors and memory limit it.
    """
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
    """Return the number of workers that processors, memory and clients allow; at least 1.

    memory: bytes that may be used. each: bytes that a worker takes.
    """
    return max(1, min(processors // threads, memory // each, clients))
