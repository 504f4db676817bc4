"""A link that breaks again and again: a proxy that resets connections after so many bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_PIECE_BYTES = 1 << 14


@dataclass
class FragileLink:
    """A proxy on loopback. `carries`: bytes of a connection, both ways together, before its end."""

    onward: int
    carries: int
    port: int = 0
    resets: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self.onward)
        left = self.carries

        async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal left
            while left > 0 and (data := await source.read(min(left, _PIECE_BYTES))):
                left -= len(data)
                sink.write(data)
                await sink.drain()

        ways = [
            asyncio.create_task(relay(reader, onward_writer)),
            asyncio.create_task(relay(onward_reader, writer)),
        ]
        self._tasks.update(ways)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            self.resets += left <= 0
        finally:
            for way in ways:
                way.cancel()
            for each in (writer, onward_writer):
                _reset(each)
            await asyncio.gather(*ways, return_exceptions=True)
            self._tasks.difference_update(ways)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection without a goodbye, and with it what is still on its way."""
    found = writer.get_extra_info("socket")
    if found is not None:
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.asynccontextmanager
async def fragile_link(onward: int, *, carries: int, port: int = 0) -> AsyncIterator[FragileLink]:
    """A proxy before `onward`, in the event loop of whoever asks."""
    link = FragileLink(onward, carries)
    server = await asyncio.start_server(link.connected, "127.0.0.1", port)
    link.port = server.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        server.close()
        for task in link._tasks:
            task.cancel()
        await asyncio.sleep(0)
