"""Links for tests: one that resets connections, and a thin uplink with large buffers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_PIECE_BYTES = 1 << 14
_PACKET_BYTES = 1448


@dataclass
class FragileLink:
    """A proxy on loopback. `carries`: bytes of a connection, in both directions together, before
    it is reset. `open`: number of open connections."""

    onward: int
    carries: int
    port: int = 0
    resets: int = 0
    open: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def reset_all(self) -> None:
        """Reset every connection."""
        for task in self._tasks:
            task.cancel()

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
        self.open += 1
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            self.resets += left <= 0
        finally:
            self.open -= 1
            for way in ways:
                way.cancel()
            for each in (writer, onward_writer):
                _reset(each)
            await asyncio.gather(*ways, return_exceptions=True)
            self._tasks.difference_update(ways)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Reset a connection; bytes in flight are lost."""
    found = writer.get_extra_info("socket")
    if found is not None:
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.asynccontextmanager
async def fragile_link(onward: int, *, carries: int, port: int = 0) -> AsyncIterator[FragileLink]:
    """Run a proxy in front of port `onward`, in the caller's event loop."""
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


@dataclass
class Line:
    """One direction of a thin link. `sent`: bytes that it has carried."""

    bytes_per_second: float
    sent: int = 0
    _free: float = 0.0

    def book(self, size: int) -> float:
        """Reserve the line for these bytes; return the time at which it will have carried them."""
        self._free = max(self._free, asyncio.get_running_loop().time())
        self._free += size / self.bytes_per_second
        return self._free

    async def carry(self, size: int, booked: float | None) -> None:
        """Wait until the line has carried these bytes; book them first if `booked` is None."""
        until = self.book(size) if booked is None else booked
        await asyncio.sleep(until - asyncio.get_running_loop().time())
        self.sent += size


@dataclass
class ThinLink:
    """A proxy on loopback that accepts bytes at once and forwards them at the rate of a thin line.

    All connections share two lines, one per direction. Each connection has a buffer per line, which
    is still sent after the connection ends. `one_queue`: True to forward packets of all connections
    in the order of arrival; False to let connections take turns.
    """

    onward: int
    up: Line
    down: Line
    buffer_bytes: int
    one_queue: bool = False
    port: int = 0
    connections: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self.onward)
        down = asyncio.create_task(self._relay(onward_reader, writer, self.down))
        try:
            await self._relay(reader, onward_writer, self.up)
        finally:
            down.cancel()
            await asyncio.gather(down, return_exceptions=True)
            for each in (writer, onward_writer):
                _reset(each)

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line
    ) -> None:
        waiting: asyncio.Queue[tuple[bytes, float | None]] = asyncio.Queue(
            max(1, self.buffer_bytes // _PACKET_BYTES)
        )

        async def fill() -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(_PACKET_BYTES):
                    await waiting.put((data, line.book(len(data)) if self.one_queue else None))
            await waiting.put((b"", None))

        filling = asyncio.create_task(fill())
        try:
            while (packet := await waiting.get())[0]:
                data, booked = packet
                await line.carry(len(data), booked)
                if not writer.transport.is_closing():
                    writer.write(data)
        finally:
            filling.cancel()
        writer.transport.abort()


@contextlib.asynccontextmanager
async def thin_link(
    onward: int,
    *,
    up: float = math.inf,
    down: float = math.inf,
    buffer_bytes: int,
    one_queue: bool = False,
) -> AsyncIterator[ThinLink]:
    """Run a thin link to port `onward`, in the caller's event loop. up, down: bytes per second."""
    link = ThinLink(onward, Line(up), Line(down), buffer_bytes, one_queue)
    server = await asyncio.start_server(link.connected, "127.0.0.1", 0)
    link.port = server.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        server.close()
        for task in list(link._tasks):
            task.cancel()
        await asyncio.gather(*link._tasks, return_exceptions=True)
