"""The jobs of a worker process and their results, in forms that can be pickled."""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from potluck.client.private_training import GrantedTraining
from potluck.client.training.local_update import Trained
from potluck.client.training.task_training import (
    ClientFiles,
    GroupMember,
    TrainingFiles,
    UnfitForLanesError,
)
from potluck.common.disclosure import Weighting
from potluck.common.errors import PotluckError, StorageError
from potluck.common.learning.task_failures import crashed
from potluck.common.names import ClientId
from potluck.common.trainer import TrainingProgress
from potluck.common.updates.kept_states import PURPOSES
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:
    from potluck.client.training.auxiliary_files import ReceivedAuxiliaries
    from potluck.client.training.processes.training_seat import TrainingSeat
    from potluck.client.training.processes.worker_count import TrainingMemory


# Progress -----------------------------------------------------------------------------------------

PLACES: Final = 1024
"""Maximum number of trainings at once in one process."""
_BYTES: Final = 9 * PLACES


class ProgressBoard:
    """One entry per running training: its progress in [0, 1], and a flag that cancels it."""

    def __init__(self, descriptor: int | None = None) -> None:
        """descriptor: file descriptor of an existing board; None makes a new one.

        Raises StorageError.
        """
        if descriptor is None:
            self.descriptor = _shared_memory()
        else:
            self.descriptor = descriptor
        memory = mmap.mmap(self.descriptor, _BYTES)
        self._shares = np.frombuffer(memory, np.float64, PLACES)
        self._cancelled = np.frombuffer(memory, np.uint8, PLACES, offset=8 * PLACES)

    def release(self) -> None:
        """Close the descriptor once the other process has a copy; the memory stays usable."""
        os.close(self.descriptor)

    def clear(self) -> None:
        """Reset all entries: progress 0, not cancelled."""
        self._shares.fill(0.0)
        self._cancelled.fill(0)

    def follow(self, place: int, progress: TrainingProgress) -> None:
        """Pass progress from the worker process to `progress`, and a cancellation to the worker."""
        if progress.is_cancelled():
            self._cancelled[place] = 1
        progress.note(float(self._shares[place]))

    def at(self, place: int) -> TrainingProgress:
        """Return the progress of a training in this process, visible to the other process."""
        return TrainingProgress(
            lambda share: self._shares.__setitem__(place, share),
            lambda: bool(self._cancelled[place]),
        )


def _shared_memory() -> int:
    """Return the descriptor of new shared memory; without memfd, of an unnamed file."""
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("potluck-board")
            os.ftruncate(descriptor, _BYTES)
            return descriptor
        with tempfile.TemporaryFile(prefix="potluck-board-") as file:
            file.truncate(_BYTES)
            return os.dup(file.fileno())
    except OSError as error:
        raise StorageError(
            f"can't allocate {_BYTES} bytes of memory that is shared with a worker process: "
            f"{error.strerror}; set TMPDIR to a folder this user may write to, or workers = 1"
        ) from error


# Jobs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SentFiles:
    """The files of a training, in a form that can be pickled; fields as in `TrainingFiles`.

    keep_at: path by purpose. spare: a file that may be overwritten."""

    model: Path
    kept: Mapping[str, Path]
    own: Path | None
    update: Path
    keep_at: Mapping[str, Path]
    auxiliaries: ReceivedAuxiliaries | None
    spare: Path | None
    granted: GrantedTraining | None

    @classmethod
    def of(cls, files: TrainingFiles) -> SentFiles:
        """Convert a training's files before they are sent; takes the spare file."""
        return cls(
            model=files.model,
            kept=dict(files.kept),
            own=files.own,
            update=files.update,
            keep_at={purpose: files.keep_at(purpose) for purpose in PURPOSES},
            auxiliaries=files.auxiliaries,
            spare=files.spare(),
            granted=files.granted,
        )

    def received(self) -> TrainingFiles:
        """Convert back, in the worker process."""
        there = self.spare is not None and self.spare.is_file()  # a dead worker may have used it
        spares = [self.spare] if there else []
        return TrainingFiles(
            model=self.model,
            kept=self.kept,
            own=self.own,
            update=self.update,
            keep_at=self.keep_at.__getitem__,
            auxiliaries=self.auxiliaries,
            spare=lambda: spares.pop() if spares else None,
            granted=self.granted,
        )

    def clean_up(self) -> None:
        """Delete the spare file if it was not used."""
        if self.spare is not None:
            self.spare.unlink(missing_ok=True)


class WorkerJob(ABC):
    """A job for a worker process."""

    @abstractmethod
    def carry_out(self, seat: TrainingSeat, board: ProgressBoard) -> Any:
        """Do the job, in the worker process; the result is sent back."""


@dataclass(frozen=True, kw_only=True)
class CheckOne(WorkerJob):
    """Job that checks if a training could begin. work: serialised. layout: the model's header."""

    work: bytes
    layout: bytes

    def carry_out(self, seat: TrainingSeat, board: ProgressBoard) -> None:  # noqa: ARG002
        """Check the training; returns nothing."""
        seat.check(rpc.Train.FromString(self.work), self.layout)


@dataclass(frozen=True, kw_only=True)
class TrainOne(WorkerJob):
    """Job that trains one client. instruction: serialised."""

    instruction: bytes
    files: SentFiles

    def carry_out(self, seat: TrainingSeat, board: ProgressBoard) -> Trained:
        """Return the result; the update's tensors are in its file."""
        progress = board.at(0)
        trained = seat.train(
            _read(self.instruction),
            self.files.received(),
            progress=progress.note,
            cancelled=progress.is_cancelled,
        )
        return portable(trained)


@dataclass(frozen=True, kw_only=True)
class SentMember:
    """A client of a group. instruction: serialised. lane: its place among its companions."""

    instruction: bytes
    files: SentFiles
    lane: int


@dataclass(frozen=True, kw_only=True)
class TrainGroup(WorkerJob):
    """Job that trains clients in one batched step; `TaskTraining` explains companions."""

    members: Sequence[SentMember]
    companions: Sequence[ClientId]

    def carry_out(
        self, seat: TrainingSeat, board: ProgressBoard
    ) -> Sequence[Trained | PotluckError | UnfitForLanesError]:
        """Return the members' results in their order."""
        members = [
            GroupMember(
                instruction=_read(each.instruction),
                files=each.files.received(),
                progress=board.at(place),
                lane=each.lane,
            )
            for place, each in enumerate(self.members)
        ]
        return [
            each if isinstance(each, Exception) else portable(each)
            for each in seat.train_together(members, self.companions)
        ]


@dataclass(frozen=True, kw_only=True)
class MeasureOne(WorkerJob):
    """Job that measures a model on a client's data. instruction: serialised."""

    instruction: bytes
    files: ClientFiles

    def carry_out(self, seat: TrainingSeat, board: ProgressBoard) -> Any:
        """Return the evaluation's counts, or its metrics."""
        progress = board.at(0)
        return seat.evaluate(
            _read(self.instruction),
            self.files,
            progress=progress.note,
            cancelled=progress.is_cancelled,
        )


@dataclass(frozen=True, kw_only=True)
class MemoryOfOne(WorkerJob):
    """Job that measures the GPU memory of a training. instruction: serialised."""

    instruction: bytes
    files: ClientFiles

    def carry_out(self, seat: TrainingSeat, board: ProgressBoard) -> TrainingMemory | None:
        """Return the measured memory; None if it can't be measured."""
        progress = board.at(0)
        return seat.memory_of(
            _read(self.instruction),
            self.files,
            progress=progress.note,
            cancelled=progress.is_cancelled,
        )


def portable(trained: Trained) -> Trained:
    """Return a result that can be pickled: with reports made, without tensors.

    The tensors are in the result's file."""
    outcome = trained.outcome
    reports = {weighting: outcome.report(weighting) for weighting in Weighting}
    return replace(trained, outcome=replace(outcome, report=reports.__getitem__, sent=None))


def portable_error(error: BaseException) -> Exception:
    """Return the error, or a one-line TrainingError if the error can't be pickled."""
    if isinstance(error, (PotluckError, OSError, UnfitForLanesError)):
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  # our own, to see that it can be read
        except Exception:
            return crashed(error)
        return error
    return crashed(error)


def _read(instruction: bytes) -> rpc.Instruction:
    return rpc.Instruction.FromString(instruction)
