"""Frames of files on the wire, encoded and decoded without copying their bytes more than once.

`CoordinatorServiceFetchModelResponse`, `OperatorServiceFetchModelResponse` and
`SubmitUpdateRequest` have the same shape: field 1 is a frame, whose field 2 is a chunk of bytes.
Nearly every message contains only such a chunk. Protobuf would copy it three times when sending and
twice when receiving. Here, sending joins the chunk to its few bytes of framing, and receiving
returns a view of the message. All other messages go through protobuf.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from potluck.common.errors import ProtocolError, ProtocolVersionError, disk_error
from potluck.common.net.protocol import CHUNK_BYTES, FRAMING_VERSION
from potluck.common.net.transfer import check_digest
from potluck.common.tensors.digest import file_pieces
from potluck.rpc.v1 import transfer_pb2

# Frames -------------------------------------------------------------------------------------------

_FRAME_TAG = 0x0A  # field 1, length-delimited
_CHUNK_TAG = 0x12  # field 2, length-delimited

MessageType = TypeVar("MessageType", bound=Message)


def encode_chunk(chunk: bytes | memoryview) -> bytes:
    """Return the encoded message whose frame contains this chunk. Copies the chunk once."""
    inner = bytes((_CHUNK_TAG,)) + _varint(len(chunk))
    return b"".join((bytes((_FRAME_TAG,)), _varint(len(inner) + len(chunk)), inner, chunk))


def chunk_of(message: bytes) -> memoryview | None:
    """Return a view of the chunk in a message; None if the message contains something else."""
    if not message or message[0] != _FRAME_TAG:
        return None
    begin, length = _read_varint(message, 1)
    if begin + length != len(message) or length == 0 or message[begin] != _CHUNK_TAG:
        return None
    begin, length = _read_varint(message, begin + 1)
    if begin + length != len(message):
        return None
    return memoryview(message)[begin:]


def file_messages(
    path: Path, offset: int, *, chunk_bytes: int = CHUNK_BYTES, end: int | None = None
) -> Iterator[bytes]:
    """Yield a file from `offset` on as encoded chunks. Raises StorageError if the file can't be
    read.

    end: offset at which to stop, not beyond the file's end; None to stop at its end.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size if end is None else end
            for chunk in file_pieces(file.fileno(), offset, size, chunk_bytes):
                yield encode_chunk(chunk)
    except OSError as error:
        raise disk_error(error, path) from error


class FrameDecoder(Generic[MessageType]):
    """A gRPC deserializer that returns chunks as views, and parses all other messages.

    gRPC accepts any object from a deserializer. A message that can't be parsed becomes None,
    because an exception in a deserializer would end the call without a reason.
    """

    def __init__(self, message: type[MessageType]) -> None:
        self._message = message

    def __call__(self, text: bytes) -> memoryview | MessageType | None:
        """Return a chunk, a parsed message, or None if the bytes can't be parsed."""
        chunk = chunk_of(text)
        if chunk is not None:
            return chunk
        try:
            return self._message.FromString(text)
        except DecodeError:
            return None


def encode_frame(message: Message | bytes) -> bytes:
    """Return the bytes of a message for gRPC. A chunk is encoded already (`encode_chunk`) and
    returned unchanged."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def require(message: MessageType | memoryview | None, what: str) -> MessageType:
    """Return `message` if it is a parsed message. If it is a chunk or None, raise ProtocolError.
    what: expected message, for the error."""
    if message is None or isinstance(message, memoryview):
        got = "bytes that are not a valid message" if message is None else "a chunk"
        raise ProtocolError(f"the stream contains {got}; expected {what}")
    return message


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(text: bytes, at: int) -> tuple[int, int]:
    """Return (end, value) of the number that begins at `at`; (-1, 0) if there is none."""
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(text):
            return -1, 0
        byte = text[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return at, value
    return -1, 0


# Frames of an upload ------------------------------------------------------------------------------


def update_header(first: Any) -> transfer_pb2.UpdateHeader:
    """Return the header in the first frame of an upload. Raises ProtocolError if it is not
    valid."""
    request = require(first, "an upload's header")
    if request.frame.WhichOneof("part") != "header":
        raise ProtocolError("the first frame of an upload is not its header; send the header first")
    return checked_header(request.frame.header)


def checked_header(header: transfer_pb2.UpdateHeader) -> transfer_pb2.UpdateHeader:
    """Return a header after checking its framing version and the form of its digest. Raises
    ProtocolError."""
    if header.version != FRAMING_VERSION:
        raise ProtocolVersionError(
            f"the upload has framing version {header.version}; expected {FRAMING_VERSION}",
            version=header.version,
        )
    check_digest(header.blake3)
    return header


def update_trailer(request: Any) -> transfer_pb2.FileTrailer:
    """Return the trailer in the frame that ends an upload. Raises ProtocolError if the frame is not
    a trailer."""
    frame = require(request, "a chunk or a trailer").frame
    if frame.WhichOneof("part") != "trailer":
        raise ProtocolError(
            "the upload contains an unexpected frame; after the header, only chunks and a "
            "trailer may follow"
        )
    trailer: transfer_pb2.FileTrailer = frame.trailer
    return trailer
