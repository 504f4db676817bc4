"""How many processes of a host train side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from potluck.client.config import ClientConfig
from potluck.common.process.capacity import available_memory, available_processors

BYTES_PER_WORKER: Final = 400 * 2**20
"""Memory of a process with torch and a small model, generously."""
_GPUS: Final = Path("/dev/nvidiactl")


def worker_count(config: ClientConfig) -> int:
    """Worker processes of a host, over all its devices; 1 for none beside the host's own.

    Raises ConfigurationError for malformed or repeated clients.
    """
    devices = config.device.split(",")
    if config.workers != "auto":
        return config.workers * len(devices)
    on_gpu = config.device != "cpu" and (config.device != "auto" or _GPUS.exists())
    if on_gpu:
        return len(devices)
    return automatic(
        len(config.client_ids()),
        config.threads,
        processors=available_processors(),
        memory=available_memory(),
    )


def automatic(clients: int, threads: int, *, processors: int, memory: int) -> int:
    """Worker processes on a CPU: they fill the processors, have memory, and find clients.

    memory: bytes that may be used.
    """
    return max(1, min(processors // threads, memory // BYTES_PER_WORKER, clients))
