"""Runs a strategy's training on the coordinator, after the updates are combined."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from potluck.common.errors import RunError
from potluck.common.interruptible import in_thread
from potluck.server.reduce.model_work import ModelWork
from potluck.server.reduce.training_job import TrainingJob, UpdateInJob, Workplace
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.store.model_files import ModelFiles, ModelVersion

# The process --------------------------------------------------------------------------------------

log = structlog.get_logger()

ATTEMPTS: Final = 3
"""Maximum number of attempts. If the process is killed, another attempt is made, which gives the
same result."""


class TrainingProcess:
    """The process in which a run trains on the coordinator, one job after the other.

    It starts with the first job and is kept for the next ones, because importing torch takes
    seconds. It ends with `close`, or with the coordinator. Used on the event loop.
    """

    def __init__(self, workplace: Workplace) -> None:
        self.workplace = workplace
        self._process: asyncio.subprocess.Process | None = None

    async def train(self, job: TrainingJob, progress: Callable[[float], None]) -> None:
        """Run a job. If the caller is cancelled, the process is killed.

        progress: function called with the completed share, in [0, 1]. Raises RunError if the job
        fails, or if the process is killed in every attempt.
        """
        code = 0
        for attempt in range(1, ATTEMPTS + 1):
            progress(0.0)
            code = await self._attempt(job, progress)
            if code == 0:
                return
            if code > 0:
                raise RunError(f"the training on the coordinator failed: exit code {code}")
            log.warning("the training on the coordinator was killed", signal=-code, attempt=attempt)
        raise RunError(
            f"the training on the coordinator was killed {ATTEMPTS} times, the last time by signal "
            f"{-code}; check that the machine has enough memory"
        )

    async def close(self) -> None:
        """End the process; does nothing if there is none."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()

    async def _attempt(self, job: TrainingJob, progress: Callable[[float], None]) -> int:
        """Run a job once. Return 0 if it is done, and the exit code if the process has ended
        (negative if a signal ended it). Raises RunError if the job fails."""
        answered = False
        try:
            process = self._process = self._process or await _started()
            if process.stdin is None or process.stdout is None:
                raise RunError("the training process has no pipes; report this as a bug")
            with contextlib.suppress(OSError):  # the process was already killed
                process.stdin.write(job.model_dump_json().encode() + b"\n")
                await process.stdin.drain()
            async for line in process.stdout:
                answer = _read(line)
                if isinstance(answer.get("progress"), float | int):
                    progress(float(answer["progress"]))
                if "error" in answer:
                    raise RunError(f"the training on the coordinator failed: {answer['error']}")
                if "done" in answer:
                    answered = True
                    return 0
            return await process.wait()
        finally:
            if not answered:
                await self.close()


async def _started() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "potluck.server.reduce.training_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # a terminal's signals must only reach the coordinator
    )


def _read(line: bytes) -> dict[str, Any]:
    """Return the values in a line of the process's output; none if the process was killed while it
    wrote the line."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# The training -------------------------------------------------------------------------------------


async def train_on_coordinator(
    work: ModelWork,
    files: ModelFiles,
    model: ModelVersion,
    updates: Sequence[SpooledUpdate],
    *,
    base: ModelVersion,
    process: TrainingProcess,
    run_file: str,
    round_number: int,
    progress: Callable[[float], None],
) -> ModelVersion:
    """Run the strategy's own training on `model` and return the resulting model. Raises RunError.

    base: the model that clients trained from. process: the run's. progress: called with the share
    of the training that is done.

    Cancellation kills the training process. After a restart of the coordinator, training starts
    again from the same files, and gives the same model.
    """
    trained = files.folder / f".trained-{secrets.token_hex(8)}"
    with files.lent(model.blake3) as path, files.lent(base.blake3) as base_path:
        job = TrainingJob(
            run_file=run_file,
            workplace=process.workplace,
            round=round_number,
            model=path,
            base=base_path,
            updates=[
                UpdateInJob(client=each.client, path=each.path, compressed=each.row.compressed)
                for each in updates
            ],
            trained=trained,
        )
        wanted: frozenset[str] = frozenset()
        try:
            await process.train(job, progress)
            published = await in_thread(work.publish_trained, trained, base, round_number)
            wanted = published.digests
            return published
        finally:
            files.let_go({model.blake3} - wanted)
            trained.unlink(missing_ok=True)
