"""How many processes share a GPU where nobody says: as many trainings as its memory holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from potluck.client.training.kept_choices import KeptChoice

SHARE_OF_FREE: Final = 0.9
"""Of the memory that is free; the rest is for what varies from client to client."""
_GIBIBYTE: Final = 2**30


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """In bytes. peak: of tensors, at most, as torch's allocator held them. context: of all else
    that the process takes of the GPU. free: for this process and others like it, its own included.
    """

    peak: int
    context: int
    free: int


class WorkerChoice(KeptChoice):
    """How many workers share a GPU, and what that was chosen by; see `TrainingMemory`.

    lanes: clients that one training is of, where all are trained together. most: workers that the
    processors and the memory of the machine are enough for.
    """

    peak: int
    context: int
    free: int
    lanes: int
    most: int
    workers: int

    @property
    def reason(self) -> str:
        """For people."""
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
    """As many workers, up to `most`, as find memory, each for its share of the clients that are
    trained together; at least 1, and 1 where nothing could be measured.

    subject: of what. lanes: clients that are trained together, from 1. most: at least 1.
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
    """The most workers, from 1 to `most`, that find memory side by side."""
    there = SHARE_OF_FREE * memory.free
    for workers in range(most, 1, -1):
        clients = -(-lanes // workers)
        if workers * (memory.context + clients * memory.peak) <= there:
            return workers
    return 1
