"""The data connection to the coordinator: calls, and pauses before calls are repeated."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio
from google.protobuf.message import Message

from potluck.client.base.backoff import Backoff
from potluck.client.base.host_metrics import HostMetrics
from potluck.client.transfer.object_stores import ObjectStores
from potluck.common.errors import UnreachableError, from_rpc_error
from potluck.common.monitoring.metric_labels import Direction
from potluck.common.net.frames import FrameDecoder, encode_frame
from potluck.common.net.protocol import CHUNK_BYTES, LEAST_CHUNK_BYTES
from potluck.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc

# Chunks -------------------------------------------------------------------------------------------
# Chunks must fit the link: if it breaks, the received part of a chunk is lost.

_FEW = 8
_MANY = 64
"""Number of chunks; if at least this many arrived before a link broke, the chunk size is
doubled."""


@dataclass
class ChunkSize:
    """The chunk size in one direction.

    If a link breaks before a chunk arrives, chunks must get smaller, or a file never arrives."""

    bytes: int = CHUNK_BYTES

    def broke(self, gained: int) -> None:
        """Adapt the size after the link broke; `gained`: bytes that had arrived.

        Halve the size if few chunks had arrived, so that less is lost next time. Double the size if
        many had arrived.
        """
        if gained < _FEW * self.bytes:
            self.bytes = max(LEAST_CHUNK_BYTES, self.bytes // 2)
        elif gained >= _MANY * self.bytes:
            self.passed()

    def passed(self) -> None:
        """Double the size, after the rest of a file has been transferred."""
        self.bytes = min(CHUNK_BYTES, self.bytes * 2)


# Pieces -------------------------------------------------------------------------------------------
# Heartbeats and pings wait behind the bytes in transit, so pieces must be small on a slow link.

_SECONDS = 3.0
"""Target duration of a piece, in seconds, at the last piece's rate; ping timeouts are longer."""

LEAST_PIECE_BYTES = 5 << 10
"""Minimum size of a piece, also used while the rate is unknown. Several hosts may share a line: at
7.5 kB/s, the first pieces and handshakes of seven hosts arrive within a ping's timeout."""

_GROWTH = 4
"""Maximum growth factor: buffers in the network can make a small piece look too fast."""


@dataclass
class PieceSize:
    """The piece size in one direction: the bytes that the link carries in a few seconds."""

    bytes: int = LEAST_PIECE_BYTES

    def confirmed(self, size: int, seconds: float) -> None:
        """Adapt the size to the rate at which a piece arrived."""
        carried = int(size / max(seconds, 1e-3) * _SECONDS)
        self.bytes = max(LEAST_PIECE_BYTES, min(carried, self.bytes * _GROWTH))

    def broke(self, gained: int, seconds: float) -> None:
        """Halve the size after the link broke; reduce it further if the measured rate is lower."""
        carried = int(gained / max(seconds, 1e-3) * _SECONDS)
        self.bytes = max(LEAST_PIECE_BYTES, min(carried, self.bytes // 2))


# The link -----------------------------------------------------------------------------------------

_SERVICE = "/potluck.rpc.v1.CoordinatorService"


class LinkMetrics(Protocol):
    """Counters of a link's traffic."""

    def moved(self, direction: Direction, size: int) -> None:
        """Count transferred bytes of a model or an update."""

    def retried(self, direction: Direction) -> None:
        """Count a repeated attempt at a transfer."""


@contextlib.contextmanager
def calling() -> Iterator[None]:
    """Turn gRPC's exceptions in the block into Potluck's.

    If a connection is closed, gRPC ends its calls as if the waiting task were cancelled. In this
    block such calls raise UnreachableError, as other broken calls do.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnreachableError("the connection was closed") from None


class Link:
    """The connection for uploads and downloads. Runs on the event loop.

    It is separate from the control stream, so that heartbeats never wait behind a model.
    """

    def __init__(
        self,
        make_channel: Callable[[], grpc.aio.Channel],
        *,
        generator: random.Random,
        maximum_seconds: float,
        concurrent: int,
        grace_seconds: float = 60.0,
        metrics: LinkMetrics | None = None,
        stores: ObjectStores | None = None,
    ) -> None:
        """`grace_seconds`: how long transfers may continue over a connection that was replaced.
        `stores`: object stores that files may go through."""
        self._make_channel = make_channel
        self._generator = generator
        self._maximum_seconds = maximum_seconds
        self._grace_seconds = grace_seconds
        self._channel = make_channel()
        self._closing: set[asyncio.Task[None]] = set()
        self._renewed = asyncio.Event()
        self.stub = self._make_stub()
        self.metrics: LinkMetrics = metrics or HostMetrics()
        self.stores = stores or ObjectStores()
        self.transfers = asyncio.Semaphore(concurrent)
        """Semaphore that each file transfer holds; it limits the number of concurrent transfers."""
        self.chunks = {direction: ChunkSize() for direction in Direction}
        self.pieces = {direction: PieceSize() for direction in Direction}

    def renew(self) -> None:
        """Connect at once and end all pauses, after the coordinator can be reached again.

        Transfers over the old connection may continue for the grace time.
        """
        closing = asyncio.create_task(self._channel.close(self._grace_seconds))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._channel = self._make_channel()
        self.stub = self._make_stub()
        self._renewed.set()
        self._renewed = asyncio.Event()

    def backoff(self) -> Backoff:
        """Return the pauses of a new series of attempts."""
        return Backoff(self._generator, maximum=self._maximum_seconds)

    async def pause(self, seconds: float) -> None:
        """Wait this long, or until the coordinator can be reached again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._renewed.wait()

    def chunk_bytes(self, direction: Direction, piece: int) -> int:
        """Return the chunk size for a piece with this number of bytes."""
        return min(self.chunks[direction].bytes, max(LEAST_CHUNK_BYTES, piece // 4))

    def fetch_model(self, request: coordinator_pb2.CoordinatorServiceFetchModelRequest) -> Any:
        """Call FetchModel; the chunks arrive as views of their bytes (see `frames.py`)."""
        method = self._channel.unary_stream(
            f"{_SERVICE}/FetchModel",
            request_serializer=encode_frame,
            response_deserializer=FrameDecoder(
                coordinator_pb2.CoordinatorServiceFetchModelResponse
            ),
        )
        return method(request)

    def submit_update(self, frames: AsyncIterator[Message | bytes]) -> Any:
        """Call SubmitUpdate; the chunks are already encoded (see `frames.py`)."""
        method = self._channel.stream_unary(
            f"{_SERVICE}/SubmitUpdate",
            request_serializer=encode_frame,
            response_deserializer=coordinator_pb2.SubmitUpdateResponse.FromString,
        )
        return method(frames)

    async def close(self) -> None:
        """End all calls."""
        for closing in self._closing:
            closing.cancel()
        await self._channel.close(None)

    def _make_stub(self) -> coordinator_pb2_grpc.CoordinatorServiceAsyncStub:
        # At run time one generated class serves sync and async channels; type stubs have two.
        return coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
