"""The part of a round that a strategy trains on the coordinator, after the updates are reduced."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from potluck.common.interruptible import in_thread
from potluck.server.aggregation.update_files import SpooledUpdate
from potluck.server.runs.run import Run
from potluck.server.store.model_files import ModelVersion
from potluck.server.training.training_job import TrainingJob, UpdateInJob
from potluck.server.training.worker_process import train_apart


async def train_on_coordinator(
    run: Run, model: ModelVersion, updates: Sequence[SpooledUpdate]
) -> ModelVersion:
    """The model that the strategy's own training makes of `model`. Raises RunError.

    Cancelling kills the process that trains. A coordinator that was killed begins anew, from the
    same files, and ends with the same model.
    """
    services, round_number = run.services, run.machine.round
    trained = services.files.folder / f".trained-{secrets.token_hex(8)}"
    with services.files.lent(model.blake3) as path, services.files.lent(run.model.blake3) as base:
        job = TrainingJob(
            run_file=run.row.run_file,
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
            run.trained = share

        wanted: frozenset[str] = frozenset()
        try:
            await train_apart(job, note)
            published = await in_thread(run.work.publish_trained, trained, run.model, round_number)
            wanted = published.digests
            return published
        finally:
            run.trained = None
            services.files.let_go({model.blake3} - wanted)
            trained.unlink(missing_ok=True)
