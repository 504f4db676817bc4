"""The instruction to disclose a signal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.client.disclosure.releases import ReleaseNoise, randomness
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.handler_context import HandlerContext
from potluck.common.disclosure import Parameters
from potluck.common.names import ClientId
from potluck.common.signal import signal_named
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:  # imports torch, which takes seconds: only the worker's thread may do so
    from potluck.client.training.device import TrainingDevice


async def disclose(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Answer with a profile: a new one, or the stored one if it was disclosed before."""

    async def measure(parameters: Parameters) -> dict[str, Any]:
        return await _measured(context, active, parameters)

    profile = await context.discloser.answer(active.instruction, measure)
    return rpc.Answer(instruction_id=active.instruction.id, profile=profile)


async def _measured(
    context: HandlerContext, active: ActiveInstruction, parameters: Parameters
) -> dict[str, Any]:
    """Compute the profile's payload, with its noise."""
    work, client = active.instruction.disclose, ClientId(active.instruction.client_id)
    noise = ReleaseNoise(work.signal, parameters, randomness(context.policy, client, parameters))

    async def measured(model: Path | None) -> dict[str, Any]:
        def measure(device: TrainingDevice) -> dict[str, Any]:
            return device.disclosed(
                work,
                parameters,
                client,
                noisy=noise,
                model=model,
                cancelled=active.cancelled.is_set,
            )

        payload = await context.compute(active, work.task, measure)
        noise.check_drawn()
        return payload

    if not signal_named(work.signal).needs_model:
        return await measured(None)
    async with context.model(active, work.model, work.task) as model:
        return await measured(model)
