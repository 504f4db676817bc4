"""Evaluation on the clients' held-out samples, where the coordinator has none of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from potluck.common.errors import ProtocolError
from potluck.common.learning.scores import EvaluationCounts
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.aggregation.model_files import ModelVersion
from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.instructions import evaluate_instruction, model_reference
from potluck.server.rounds.plan import RunPlan
from potluck.server.store.records import AttemptKey

log = structlog.get_logger()

_PRESENCE_SECONDS = 0.5
"""How often is looked whether clients that have not answered may still come back."""


async def gather(
    attendance: Attendance,
    instructions: Sequence[coordinator_pb2.Instruction],
    *,
    seconds: float,
    present: Callable[[str], bool] = lambda _: True,
) -> dict[str, coordinator_pb2.Answer]:
    """Have hosts carry out instructions; their answers by client.

    Waits for every client that is `present` (its host may be away for a moment), but not longer
    than so many seconds. Clients that do not answer in time are absent.
    """
    answers: dict[str, coordinator_pb2.Answer] = {}
    changed = asyncio.Event()

    def take(client: str, answer: coordinator_pb2.Answer) -> None:
        answers.setdefault(client, answer)
        attendance.retire([answer.instruction_id])
        changed.set()

    for instruction in instructions:
        client = instruction.client_id
        attendance.instruct(
            instruction,
            deadline=time.monotonic() + seconds,
            on_answer=partial(take, client),
        )
    waiting = [instruction.client_id for instruction in instructions]
    try:
        async with asyncio.timeout(seconds):
            while waiting := [c for c in waiting if c not in answers and present(c)]:
                changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PRESENCE_SECONDS):
                        await changed.wait()
    except TimeoutError:
        pass
    finally:
        attendance.retire([instruction.id for instruction in instructions], abandon=True)
    return answers


async def evaluate_on_clients(
    attendance: Attendance,
    plan: RunPlan,
    key: AttemptKey,
    model: ModelVersion,
    clients: Sequence[str],
    *,
    seconds: float,
    present: Callable[[str], bool],
) -> EvaluationCounts | None:
    """Summed counts of the clients, in the order given; None if nobody holds any out.

    Counts add up exactly, so the metrics are those of all held-out samples together.
    """
    reference = model_reference(model)
    instructions = [
        evaluate_instruction(
            plan,
            # With the attempt: a run that is resumed may ask about another model.
            f"{key.run_id}/{key.round}.{key.attempt}/evaluate/{client}",
            key.run_id,
            key.round,
            client,
            reference,
        )
        for client in clients
    ]
    answers = await gather(attendance, instructions, seconds=seconds, present=present)
    task = plan.task
    total: EvaluationCounts | None = None
    for client in clients:
        answer = answers.get(client)
        if answer is None or answer.WhichOneof("outcome") != "evaluation":
            continue
        try:
            counts = EvaluationCounts.received(
                loss_sum=answer.evaluation.loss_sum,
                confusion=answer.evaluation.confusion,
                group_samples=answer.evaluation.group_samples,
                group_correct=answer.evaluation.group_correct,
                classes=task.classes,
                groups=task.groups,
            )
        except ProtocolError as error:
            log.warning("evaluation refused", client=client, why=error.message)
            continue
        total = counts if total is None else total + counts
    return total if total is not None and total.samples else None
