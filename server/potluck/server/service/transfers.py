"""Limits the number of simultaneous file transfers, and creates the messages that send a file."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from google.protobuf.message import Message

from potluck.common.errors import ProtocolError
from potluck.common.net.frames import file_messages
from potluck.common.net.protocol import CHUNK_BYTES, FRAMING_VERSION
from potluck.rpc.v1 import coordinator_pb2, operator_pb2, transfer_pb2
from potluck.server.hosts.limits import TransferSlots

if TYPE_CHECKING:
    from potluck.server.service.coordinator_metrics import Transfer


# Confirmed bytes ----------------------------------------------------------------------------------
# Pure.
#
# gRPC buffers megabytes before it sends any, and loses them if the connection breaks. So bytes are
# counted as received only when the host requests the file from a later offset, or when gRPC took
# the whole file. Each byte of a file counts once.

_MOST_REMEMBERED = 10_000
"""Maximum number of interrupted downloads that are remembered until their host requests the
rest."""


@dataclass
class Download:
    """The transfer of one file to one host.

    counted: offset up to which bytes are in the traffic counter. handed: offset up to which bytes
    were passed to gRPC.
    """

    counted: int
    handed: int

    def hand(self, size: int) -> None:
        """Record that gRPC took the next bytes."""
        self.handed += size

    def complete(self, size: int) -> int:
        """Record that gRPC took the whole file; return the number of bytes to count now."""
        confirmed = max(0, size - self.counted)
        self.counted = max(self.counted, size)
        return confirmed


class ConfirmedBytes:
    """Counts the bytes that hosts have received in their downloads."""

    def __init__(self) -> None:
        self._downloads: OrderedDict[tuple[str, str], Download] = OrderedDict()

    def asked(self, peer: str, file: str, offset: int) -> tuple[Download, int]:
        """Record a host's request for a file from an offset. Return the download, and the number of
        bytes to count.

        Offset 0 starts a new download of the file. A host can't confirm more than gRPC took.
        """
        before = self._downloads.pop((peer, file), None)
        if before is None or not offset:
            counted, confirmed = offset, 0
        else:
            confirmed = max(0, min(offset, before.handed) - before.counted)
            counted = max(offset, before.counted)
        download = Download(counted=counted, handed=offset)
        self._downloads[peer, file] = download
        if len(self._downloads) > _MOST_REMEMBERED:
            self._downloads.popitem(last=False)
        return download, confirmed


# Transfers ----------------------------------------------------------------------------------------

Reply = TypeVar(
    "Reply",
    coordinator_pb2.CoordinatorServiceFetchModelResponse,
    operator_pb2.OperatorServiceFetchModelResponse,
)

_TURNS: Final = 4
"""Number of files that are transferred at full speed at once; more files do not increase the total
speed."""
_TURN_SECONDS: Final = 1.0
_TURN_BYTES: Final = 16 << 20
"""Minimum number of bytes of a file that must be transferred within `_TURN_SECONDS`; otherwise its
turn ends."""


class Transfers:
    """Limits the number of simultaneous transfers, and the number of transfers at full speed. Used
    on the event loop."""

    def __init__(self, at_once: int) -> None:
        """at_once: see `concurrent_transfers` in `config.py`."""
        self._places = asyncio.Semaphore(at_once)
        self._slots = TransferSlots(_TURNS, seconds=_TURN_SECONDS, least_bytes=_TURN_BYTES)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait until one more transfer is allowed, and count this transfer while the block runs."""
        async with self._places:
            yield

    @contextlib.asynccontextmanager
    async def turn(self, transfer: Transfer, size: int = 0) -> AsyncIterator[None]:
        """Wait for a place, then for a turn at full speed; hold the turn while bytes move.

        size: bytes in this stream, if known. Small transfers need only a place.
        """
        if 0 < size <= CHUNK_BYTES:
            async with self._places:
                yield
        else:
            async with self._places, self._slots.turn(lambda: transfer.moved):
                yield


def send_file(
    path: Path,
    blake3: str,
    offset: int,
    reply: type[Reply],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    limit: int = 0,
) -> Iterator[Message | bytes]:
    """Yield the messages that send a model file from an offset; chunks are already encoded.

    limit: maximum number of bytes; 0 for all. If more of the file remains, the trailer is omitted.

    Raises ProtocolError if the offset is beyond the file's end.
    """
    size = path.stat().st_size
    if offset > size:
        raise ProtocolError(
            f"the requested offset {offset} is beyond the file's {size} bytes", offset=offset
        )
    header = transfer_pb2.FileHeader(
        version=FRAMING_VERSION, blake3=blake3, size=size, offset=offset
    )
    yield reply(frame=transfer_pb2.ModelFrame(header=header))
    end = min(size, offset + limit) if limit else size
    yield from file_messages(path, offset, chunk_bytes=chunk_bytes, end=end)
    if end < size:
        return
    trailer = transfer_pb2.FileTrailer(blake3=blake3)
    yield reply(frame=transfer_pb2.ModelFrame(trailer=trailer))
