"""The memory that a training takes: measured on a GPU, and made less by smaller batches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, TypeVar

import structlog
import torch

from potluck.client.training.processes.worker_count import TrainingMemory
from potluck.common.errors import DeviceMemoryError
from potluck.common.settings.local_training import LocalTraining

# Measurement on a GPU -----------------------------------------------------------------------------

CONTEXT_BYTES: Final = 600 * 2**20
"""GPU memory of a process before its first tensor, a generous estimate.

Neither the driver nor torch reports it if other processes use the GPU."""


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
    # CUDA kernels and library workspaces are allocated only at the first training.
    loaded = max(0, (free_before - free) - (held - held_before))
    context = CONTEXT_BYTES + loaded
    peak = torch.cuda.max_memory_reserved(device)
    return TrainingMemory(peak=peak, context=context, free=free + held + context)


# Smaller batches ----------------------------------------------------------------------------------

log = structlog.get_logger()
Result = TypeVar("Result")


def smaller(settings: LocalTraining) -> LocalTraining | None:
    """Return the settings with half the batch size; None if the run forbids that."""
    least, half = settings.smallest_batch_size, settings.batch_size // 2
    if least is None or half < least:
        return None
    return settings.model_copy(update={"batch_size": half})


def within_memory(
    attempt: Callable[[LocalTraining], Result], settings: LocalTraining
) -> tuple[Result, LocalTraining]:
    """Return the result of `attempt` with these settings, or with the first batch size that fits.

    Also returns the settings that were used. `attempt` must start from the beginning each time.
    Raises DeviceMemoryError if no batch size that the run allows fits, and all other errors of
    `attempt`.
    """
    while True:
        try:
            return attempt(settings), settings
        except DeviceMemoryError as error:
            fewer = smaller(settings)
            if fewer is None:
                raise
            why = error.message
        log.warning("trying again with smaller batches", batch_size=fewer.batch_size, why=why)
        torch = sys.modules.get("torch")  # if torch is imported
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()  # the failed attempt left it fragmented
        settings = fewer
