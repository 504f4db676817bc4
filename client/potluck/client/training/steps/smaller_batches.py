"""Repeats a training with smaller batches if memory is too small and the run allows it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import structlog

from potluck.common.errors import DeviceMemoryError
from potluck.common.settings.local_training import LocalTraining

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
            torch.cuda.empty_cache()  # the failed attempt left memory fragmented
        settings = fewer
