"""The first and the last frame of an upload, checked by the receiver."""

from __future__ import annotations

from typing import Any

from potluck.common.errors import ProtocolError, ProtocolVersionError
from potluck.common.net.frames import require
from potluck.common.net.protocol import FRAMING_VERSION
from potluck.common.net.transfer import check_digest
from potluck.rpc.v1 import transfer_pb2


def update_header(first: Any) -> transfer_pb2.UpdateHeader:
    """Return the header in an upload's first frame, checked. Raises ProtocolError."""
    request = require(first, "an upload's header")
    if request.frame.WhichOneof("part") != "header":
        raise ProtocolError("the first frame of an upload must be its header")
    return checked_header(request.frame.header)


def checked_header(header: transfer_pb2.UpdateHeader) -> transfer_pb2.UpdateHeader:
    """Return a header after a check of its framing version and its digest's form. Raises
    ProtocolError."""
    if header.version != FRAMING_VERSION:
        raise ProtocolVersionError(
            f"the upload is framed in version {header.version}, this side reads {FRAMING_VERSION}",
            version=header.version,
        )
    check_digest(header.blake3)
    return header


def update_trailer(request: Any) -> transfer_pb2.FileTrailer:
    """Return the trailer in the frame that ends an upload. Raises ProtocolError for another
    frame."""
    frame = require(request, "a chunk or a trailer").frame
    if frame.WhichOneof("part") != "trailer":
        raise ProtocolError("after an upload's header come chunks, then a trailer")
    trailer: transfer_pb2.FileTrailer = frame.trailer
    return trailer
