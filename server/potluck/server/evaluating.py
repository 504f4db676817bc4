"""Evaluation on the clients' held-out samples, where the coordinator has none of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import structlog

from potluck.common.errors import ProtocolError
from potluck.common.scores import EvaluationCounts
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.attendance import Attendance
from potluck.server.blueprint import Blueprint
from potluck.server.model_files import Published
from potluck.server.wire import evaluate_instruction, model_reference

log = structlog.get_logger()


async def gather(
    attendance: Attendance,
    instructions: Sequence[coordinator_pb2.Instruction],
    *,
    seconds: float,
) -> dict[str, coordinator_pb2.Answer]:
    """Have hosts carry out instructions; their answers by client.

    Waits until every one of them has answered, or for so many seconds. Clients that do not
    answer in time are absent.
    """
    answers: dict[str, coordinator_pb2.Answer] = {}
    complete = asyncio.Event()

    def take(client: str, answer: coordinator_pb2.Answer) -> None:
        answers.setdefault(client, answer)
        attendance.retire([answer.instruction_id])
        if len(answers) == len(instructions):
            complete.set()

    for instruction in instructions:
        client = instruction.client_id
        attendance.instruct(
            instruction,
            deadline=time.monotonic() + seconds,
            on_answer=partial(take, client),
        )
    try:
        if instructions:
            async with asyncio.timeout(seconds):
                await complete.wait()
    except TimeoutError:
        pass
    finally:
        attendance.retire([instruction.id for instruction in instructions], abandon=True)
    return answers


async def evaluate_on_clients(
    attendance: Attendance,
    blueprint: Blueprint,
    run_id: str,
    round_number: int,
    model: Published,
    clients: Sequence[str],
    *,
    seconds: float,
) -> EvaluationCounts | None:
    """Summed counts of the attending clients, in the order given; None if nobody holds any out.

    Counts add up exactly, so the metrics are those of all held-out samples together.
    """
    reference = model_reference(model)
    instructions = [
        evaluate_instruction(
            blueprint,
            f"{run_id}/{round_number}/evaluate/{client}",
            run_id,
            round_number,
            client,
            reference,
        )
        for client in clients
        if attendance.session_of(client) is not None
    ]
    answers = await gather(attendance, instructions, seconds=seconds)
    task = blueprint.task
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
