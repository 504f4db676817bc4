"""Makes the record of a new update: the facts of its training and its file."""

from __future__ import annotations

import time
from collections.abc import Mapping

from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.instruction_log import digest_of_training
from potluck.client.transfer.saved_updates import KeptUpdate
from potluck.common.tensors.tensor_files import FileDigest
from potluck.common.updates.update_report import UpdateReport


def update_record(
    active: ActiveInstruction,
    file: FileDigest,
    report: UpdateReport,
    *,
    offer: Mapping[str, float] | None = None,
    masked_input: str = "",
    coordinator_id: str = "",
) -> KeptUpdate:
    """Return the record of an update. offer: numbers that are sent before the update.

    For a masked update, `report` is empty and `masked_input` and `coordinator_id` are given."""
    instruction, work = active.instruction, active.instruction.train
    return KeptUpdate(
        update_id=instruction.id,
        client_id=instruction.client_id,
        run_id=instruction.run_id,
        round=instruction.round,
        blake3=file.blake3,
        size=file.size,
        encoding=work.encoding,
        delta=work.delta,
        compressed=work.compressed and not masked_input,
        report=report,
        expires=time.time() + instruction.time_left.ToTimedelta().total_seconds(),
        work=digest_of_training(instruction),
        offer=dict(offer or {}),
        masked_input=masked_input,
        coordinator_id=coordinator_id,
    )
