"""The record of an update that has just been made: what its training was, and what its file is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from potluck.client.control.active_instruction import ActiveInstruction
from potluck.client.transfer.saved_updates import KeptUpdate
from potluck.common.secagg import Envelope, encode
from potluck.common.tensors.tensor_files import FileDigest

if TYPE_CHECKING:  # importing it imports torch, which only the worker's thread has time for
    from potluck.client.training.device import Trained


def open_update(job: ActiveInstruction, trained: Trained, told: int) -> KeptUpdate:
    """The record of an update that is sent as it is. told: samples, as far as disclosed."""
    instruction, steps = job.instruction, trained.settings.planned_steps(told)
    assert trained.file is not None  # noqa: S101  # whoever calls has looked
    return KeptUpdate(
        update_id=instruction.id,
        client_id=instruction.client_id,
        run_id=instruction.run_id,
        round=instruction.round,
        blake3=trained.file.blake3,
        size=trained.file.size,
        encoding=instruction.train.encoding,
        delta=instruction.train.delta,
        compressed=instruction.train.compressed,
        samples=told,
        steps=steps,
        normalizer=trained.normalizer(steps, instruction.round),
        seconds=trained.seconds,
        loss=trained.result.loss,
        reports=trained.reports(told),
        expires=_expires(job),
        work=job.entry.work,
    )


def masked_update(
    job: ActiveInstruction, file: FileDigest, word: Envelope, *, coordinator_id: str
) -> KeptUpdate:
    """The record of a masked update, of whose training nothing is said. word: the client's own that
    this file is its input to the sum."""
    instruction = job.instruction
    return KeptUpdate(
        update_id=instruction.id,
        client_id=instruction.client_id,
        run_id=instruction.run_id,
        round=instruction.round,
        blake3=file.blake3,
        size=file.size,
        encoding=instruction.train.encoding,
        delta=instruction.train.delta,
        compressed=False,
        samples=0,
        steps=0,
        seconds=0.0,
        loss=0.0,
        expires=_expires(job),
        work=job.entry.work,
        masked_input=encode(word).hex(),
        coordinator_id=coordinator_id,
    )


def _expires(job: ActiveInstruction) -> float:
    """When its deadline passes, in seconds since 1970."""
    return time.time() + job.instruction.time_left.ToTimedelta().total_seconds()
