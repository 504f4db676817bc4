"""Checks the first and the last frame of an upload."""

from __future__ import annotations

from typing import Any

from potluck.common.errors import ProtocolError, ProtocolVersionError
from potluck.common.net.frames import require
from potluck.common.net.protocol import FRAMING_VERSION
from potluck.common.net.transfer import check_digest
from potluck.rpc.v1 import transfer_pb2


def update_header(first: Any) -> transfer_pb2.UpdateHeader:
    """Return the header in the first frame of an upload. Raises ProtocolError if it is not
    valid."""
    request = require(first, "an upload's header")
    if request.frame.WhichOneof("part") != "header":
        raise ProtocolError("the first frame of an upload must be its header")
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
            "the upload sent an unexpected frame; expected a chunk or a trailer after the header"
        )
    trailer: transfer_pb2.FileTrailer = frame.trailer
    return trailer
