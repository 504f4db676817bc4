"""A host that sends the answers that a test sets, over real mutual TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from potluck.common.net.protocol import PROTOCOL_VERSION, VERSIONS
from potluck.common.net.tls import TlsFiles, channel
from potluck.common.settings import plugins
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import coordinator_pb2_grpc

Respond = Callable[[rpc.Instruction], rpc.Answer]


@contextlib.asynccontextmanager
async def hostile_host(
    address: str, tls: TlsFiles, clients: Sequence[str], respond: Respond
) -> AsyncIterator[None]:
    """Connect with data epoch 1 and answer every request to disclose."""
    async with channel(address, tls) as connection:
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
            coordinator_pb2_grpc.CoordinatorServiceStub(connection)
        )
        call = stub.Attend()
        hello = rpc.Hello(
            protocol_version=PROTOCOL_VERSION,
            versions=VERSIONS,
            client_ids=clients,
            device="cpu",
            tasks=plugins.installed(plugins.TASKS),
            data_epoch=1,
        )
        await call.write(rpc.AttendRequest(hello=hello))
        welcomed = await call.read()
        assert isinstance(welcomed, rpc.AttendResponse)

        async def attend() -> None:
            while isinstance(message := await call.read(), rpc.AttendResponse):
                if message.instruction.HasField("check"):
                    checked = rpc.Answer(
                        instruction_id=message.instruction.id, checked=rpc.Checked()
                    )
                    await call.write(rpc.AttendRequest(answer=checked))
                if message.instruction.HasField("disclose"):
                    answer = respond(message.instruction)
                    answer.instruction_id = message.instruction.id
                    await call.write(rpc.AttendRequest(answer=answer))

        attending = asyncio.create_task(attend())
        try:
            yield
        finally:
            attending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await attending
            call.cancel()
