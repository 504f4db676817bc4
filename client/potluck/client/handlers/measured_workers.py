"""Workers of a host that share GPUs; the host's first training shows how many fit in memory.

Until then each GPU has one worker. The number is stored, so that a later start divides a run's
clients into the same groups. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from potluck.client.base.worker import Worker
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.training.kept_choices import keep_choice, read_choice
from potluck.client.training.plugin_options import json_object
from potluck.client.training.processes.worker_count import (
    TrainingMemory,
    WorkerChoice,
    chosen_workers,
)
from potluck.client.training.task_training import ClientFiles
from potluck.common.errors import PotluckError, RoundClosedError
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:  # imports torch, which takes seconds: only the worker's thread may do so
    from potluck.client.training.processes.training_seat import TrainingSeat

log = structlog.get_logger()


class MeasuredWorkers:
    """Measures once how many workers fit in GPU memory, then adds them to a host's trainers."""

    def __init__(
        self,
        trainers: Worker[TrainingSeat],
        makes: Sequence[Callable[[], TrainingSeat]],
        *,
        devices: str,
        most: int,
        choices: Path | None,
    ) -> None:
        """trainers: the worker, with one seat on each GPU. makes: functions that make a further
        seat, one per GPU. devices: names of the GPUs. most: maximum number of workers per GPU.
        choices: folder of the stored choices.
        """
        self._trainers, self._makes = trainers, makes
        self._devices, self._most, self._choices = devices, most, choices
        self._settled = most == 1
        self._settling = asyncio.Lock()

    async def settle(self, active: ActiveInstruction, files: ClientFiles) -> None:
        """Return once the number of workers is decided; if this training is the first, measure it.

        Raises RoundClosedError if the training is cancelled during the wait, and StorageError.
        """
        if self._settled:
            return
        alone = ClientFiles(model=files.model, kept=dict(files.kept), own=files.own)
        async with self._settling:
            if self._settled:
                return
            choice = await self._chosen(active, alone)
            for _ in range(choice.workers - 1):
                self._trainers.add(*self._makes)
            self._settled = True
        log.info("number of workers per GPU chosen", workers=choice.workers, reason=choice.reason)

    async def _chosen(self, active: ActiveInstruction, files: ClientFiles) -> WorkerChoice:
        lanes = _lanes(active.instruction.train)
        subject = _subject(active.instruction.train, self._devices, lanes, self._most)
        known = read_choice(self._choices, WorkerChoice, subject)
        if known is not None:
            return known

        def measure(seat: TrainingSeat) -> TrainingMemory | None:
            active.started()
            return seat.memory_of(
                active.instruction,
                files,
                progress=lambda _: None,
                cancelled=active.cancelled.is_set,
            )

        try:
            memory = await self._trainers.run(measure)
        except RoundClosedError:
            raise
        except PotluckError as error:  # don't store a choice; the training itself reports the error
            log.warning("GPU memory of a training can't be measured", why=error.message)
            return chosen_workers(subject, None, lanes=lanes, most=self._most)
        choice = chosen_workers(subject, memory, lanes=lanes, most=self._most)
        return keep_choice(self._choices, choice)


def _lanes(work: rpc.Train) -> int:
    """Return the number of clients that may be trained together, including this one."""
    together = json_object(work.training_json, "training_json").get("batched")
    return max(1, len(work.companions)) if together else 1


def _subject(work: rpc.Train, devices: str, lanes: int, most: int) -> str:
    """Return everything that a choice depends on, as text."""
    parts = {
        "devices": devices,
        "task": f"{work.task.name} {work.task.options_json} {work.task.model_json}",
        "training": work.training_json,
        "together": lanes,
        "most workers": most,
    }
    return "\n".join(f"{name}: {value}" for name, value in parts.items())
