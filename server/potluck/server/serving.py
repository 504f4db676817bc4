"""Files on their way out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from potluck.common.errors import ProtocolError
from potluck.common.protocol import FRAMING_VERSION
from potluck.common.transfer import read_chunks
from potluck.rpc.v1 import transfer_pb2


def send_file(path: Path, sha256: str, offset: int) -> Iterator[transfer_pb2.ModelFrame]:
    """The frames of a model file from an offset. Raises ProtocolError for one beyond its end."""
    size = path.stat().st_size
    if offset > size:
        raise ProtocolError(f"offset {offset} lies beyond the file's {size} bytes", offset=offset)
    yield transfer_pb2.ModelFrame(
        header=transfer_pb2.FileHeader(
            version=FRAMING_VERSION, sha256=sha256, size=size, offset=offset
        )
    )
    for chunk in read_chunks(path, offset):
        yield transfer_pb2.ModelFrame(chunk=chunk)
    yield transfer_pb2.ModelFrame(trailer=transfer_pb2.FileTrailer(sha256=sha256))
