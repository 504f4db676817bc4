"""Files on their way out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import Message

from potluck.common.errors import ProtocolError
from potluck.common.net.frames import file_messages
from potluck.common.net.protocol import CHUNK_BYTES, FRAMING_VERSION
from potluck.rpc.v1 import coordinator_pb2, operator_pb2, transfer_pb2

Reply = TypeVar(
    "Reply",
    coordinator_pb2.CoordinatorServiceFetchModelResponse,
    operator_pb2.OperatorServiceFetchModelResponse,
)


def send_file(
    path: Path, blake3: str, offset: int, reply: type[Reply], *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Message | bytes]:
    """The messages that carry a model file from an offset; chunks come encoded.

    Raises ProtocolError for an offset beyond the file's end.
    """
    size = path.stat().st_size
    if offset > size:
        raise ProtocolError(f"offset {offset} lies beyond the file's {size} bytes", offset=offset)
    header = transfer_pb2.FileHeader(
        version=FRAMING_VERSION, blake3=blake3, size=size, offset=offset
    )
    yield reply(frame=transfer_pb2.ModelFrame(header=header))
    yield from file_messages(path, offset, chunk_bytes=chunk_bytes)
    trailer = transfer_pb2.FileTrailer(blake3=blake3)
    yield reply(frame=transfer_pb2.ModelFrame(trailer=trailer))
