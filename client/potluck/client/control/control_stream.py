"""One control stream: hello and welcome, then heartbeats and answers up, instructions down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc.aio

from potluck.common.errors import ProtocolError, UnreachableError
from potluck.common.plain_text import make_plain
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import coordinator_pb2_grpc

_LEAST_INTERVAL_SECONDS = 0.05
_CLOSE_SECONDS = 1.0


class ControlStream:
    """A control stream that is open. Lives on the event loop; raises what grpc.aio raises."""

    def __init__(
        self,
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub,
        *,
        heartbeat: Callable[[], rpc.Heartbeat],
    ) -> None:
        self._call = stub.Attend()
        self._heartbeat = heartbeat
        self._outbox: asyncio.Queue[rpc.AttendRequest] = asyncio.Queue()

    def say(self, message: rpc.AttendRequest) -> None:
        """Queue a message for sending."""
        self._outbox.put_nowait(message)

    async def open(self, hello: rpc.Hello) -> rpc.Welcome:
        """Send the hello and wait for the coordinator's welcome."""
        with contextlib.suppress(asyncio.InvalidStateError):  # ended already; `read` says why
            await self._call.write(rpc.AttendRequest(hello=hello))
        first = await self._call.read()
        if not isinstance(first, rpc.AttendResponse):
            raise UnreachableError("the coordinator ended the stream instead of saying welcome")
        if first.WhichOneof("message") != "welcome":
            raise ProtocolError("the coordinator did not begin with a welcome")
        make_plain(first)
        return first.welcome

    async def attend(
        self, welcome: rpc.Welcome, receive: Callable[[rpc.AttendResponse], None]
    ) -> None:
        """Until the stream ends, send heartbeats and queued messages, and call `receive`."""
        seconds = welcome.heartbeat_interval.ToTimedelta().total_seconds()
        writer = asyncio.create_task(self._write(max(seconds, _LEAST_INTERVAL_SECONDS)))
        reader = asyncio.create_task(self._read(receive))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                # On a broken stream, writing fails as well, but only reading returns the status.
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await writer
            await reader
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def close(self) -> None:
        """End the stream: signal the coordinator that no more messages will come."""
        with contextlib.suppress(Exception):  # the stream may be broken already
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._call.done_writing()
        self._call.cancel()

    async def _read(self, receive: Callable[[rpc.AttendResponse], None]) -> None:
        while isinstance(response := await self._call.read(), rpc.AttendResponse):
            make_plain(response)
            receive(response)

    async def _write(self, interval: float) -> None:
        """Send heartbeats when they are due, and messages in between."""
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            if clock() >= due:
                await self._call.write(rpc.AttendRequest(heartbeat=self._heartbeat()))
                due = clock() + interval
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    message = await self._outbox.get()
                await self._call.write(message)
