"""The instruction to disclose: label counts, an interaction matrix, or a triplet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from potluck.client.disclosure.releases import noised, randomness
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.handler_context import HandlerContext
from potluck.common.disclosure import INTERACTION_MATRIX, LABEL_COUNTS, TRIPLET, Parameters
from potluck.common.names import ClientId
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:  # importing it imports torch, which only the worker's thread has time for
    from potluck.client.training.device import TrainingDevice


async def disclose(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Answer with a profile, new or as it was disclosed before."""

    async def measure(parameters: Parameters) -> dict[str, Any]:
        return await _measured(context, active, parameters)

    profile = await context.discloser.answer(active.instruction, measure)
    return rpc.Answer(instruction_id=active.instruction.id, profile=profile)


async def _measured(
    context: HandlerContext, active: ActiveInstruction, parameters: Parameters
) -> dict[str, Any]:
    """The profile's numbers by signal, noise and all."""
    work, client = active.instruction.disclose, ClientId(active.instruction.client_id)
    noise = randomness(context.policy, client, parameters)

    def count(device: TrainingDevice) -> dict[str, Any]:
        if work.signal == LABEL_COUNTS:
            counts = device.label_counts(work.task, client)
            return {LABEL_COUNTS: noised(counts, parameters, noise)}
        return {INTERACTION_MATRIX: device.interaction_matrix(work.task, client)}

    if work.signal != TRIPLET:
        return await context.compute(active, work.task, count)
    async with context.model(active, work.model, work.task) as model:
        return await context.compute(
            active,
            work.task,
            lambda device: device.triplet(
                work.task,
                parameters,
                client,
                model=model,
                randomness=noise,
                cancelled=active.cancelled.is_set,
            ),
        )
