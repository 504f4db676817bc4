"""Runs a strategy's training on the coordinator, after the updates are combined."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from potluck.common.interruptible import in_thread
from potluck.server.aggregation.update_files import SpooledUpdate
from potluck.server.runs.models import Models
from potluck.server.runs.services import RunServices
from potluck.server.store.model_files import ModelVersion
from potluck.server.training.training_job import TrainingJob, UpdateInJob
from potluck.server.training.worker_process import train_apart


async def train_on_coordinator(
    models: Models,
    services: RunServices,
    model: ModelVersion,
    updates: Sequence[SpooledUpdate],
    *,
    run_file: str,
    round_number: int,
) -> ModelVersion:
    """Run the strategy's own training on `model` and return the resulting model. Raises RunError.

    Cancellation kills the training process. After a restart of the coordinator, training starts
    again from the same files, and gives the same model.
    """
    current = models.current
    trained = services.files.folder / f".trained-{secrets.token_hex(8)}"
    with services.files.lent(model.blake3) as path, services.files.lent(current.blake3) as base:
        job = TrainingJob(
            run_file=run_file,
            workplace=services.workplace,
            round=round_number,
            model=path,
            base=base,
            updates=[
                UpdateInJob(client=each.client, path=each.path, compressed=each.row.compressed)
                for each in updates
            ],
            trained=trained,
        )

        def note(share: float) -> None:
            models.trained = share

        wanted: frozenset[str] = frozenset()
        try:
            await train_apart(job, note)
            published = await in_thread(models.work.publish_trained, trained, current, round_number)
            wanted = published.digests
            return published
        finally:
            models.trained = None
            services.files.let_go({model.blake3} - wanted)
            trained.unlink(missing_ok=True)
