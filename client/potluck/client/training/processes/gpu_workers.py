"""Chooses how many processes share a GPU if it is not configured: as many as fit in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from potluck.client.training.kept_choices import KeptChoice

SHARE_OF_FREE: Final = 0.9
"""Usable share of the free memory; the rest covers differences between clients."""
_GIBIBYTE: Final = 2**30


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """GPU memory of a training, in bytes.

    peak: maximum memory that torch's allocator held for tensors. context: all other GPU memory of
    the process. free: memory for this process and others like it, its own included.
    """

    peak: int
    context: int
    free: int


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
            return "what its trainings take can't be measured"
        peak, context, free = (
            f"{each / _GIBIBYTE:.2f} GiB" for each in (self.peak, self.context, self.free)
        )
        many = f" of up to {self.lanes} clients" if self.lanes > 1 else ""
        return (
            f"a client's training takes {peak}, a process {context} besides, and {free} are free; "
            f"trainings{many}, at most {self.most} at once"
        )


def chosen_workers(
    subject: str, memory: TrainingMemory | None, *, lanes: int, most: int
) -> WorkerChoice:
    """Choose as many workers, up to `most`, as fit in memory; 1 if nothing could be measured.

    Each worker trains its share of the clients that are trained together; there is at least one
    worker. subject: everything that the choice depends on, as text. lanes: clients that are trained
    together, from 1. most: at least 1.
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
