"""Measurement of the GPU memory that a training takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from potluck.client.training.processes.worker_count import TrainingMemory

CONTEXT_BYTES: Final = 600 * 2**20
"""GPU memory of a process before its first tensor, a generous estimate.

It can't be measured: neither the driver nor torch reports it if other processes use the GPU.
"""


def memory_taken(device: torch.device, train: Callable[[], None]) -> TrainingMemory:
    """Run a training on a GPU and measure its memory. Raises what the training raises."""
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
