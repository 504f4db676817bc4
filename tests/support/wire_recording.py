"""Records the plaintext of all messages of a coordinator, and searches it for numbers."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from potluck.rpc.v1 import coordinator_pb2 as rpc


@dataclass
class Recording(grpc.aio.ServerInterceptor):
    """The outermost interceptor of a server; it records serialised messages.

    spool: folder whose files are copied whenever an update was received.
    """

    spool: Path | None = None
    received: dict[str, list[bytes]] = field(default_factory=dict)
    """Messages that were received, by gRPC method."""
    sent: dict[str, list[bytes]] = field(default_factory=dict)
    spooled: dict[str, bytes] = field(default_factory=dict)

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        assert handler.request_deserializer is None
        method = str(handler_call_details.method).rpartition("/")[2]
        heard, said = self.received.setdefault(method, []), self.sent.setdefault(method, [])

        def deserialize(message: bytes) -> Any:
            heard.append(bytes(message))
            return message  # the guard decodes messages itself

        def serialize(message: Any) -> bytes:
            serialised: bytes = handler.response_serializer(message)
            said.append(bytes(serialised))
            if method == "SubmitUpdate":
                self._copy_spool()
            return serialised

        return handler._replace(request_deserializer=deserialize, response_serializer=serialize)

    def _copy_spool(self) -> None:
        if self.spool is not None:
            for path in self.spool.rglob("*"):
                if path.is_file():
                    self.spooled[str(path)] = path.read_bytes()

    @property
    def traffic(self) -> bytes:
        """Return all messages of both directions, as bytes."""
        both = (self.received, self.sent)
        return b"\0".join(each for way in both for some in way.values() for each in some)


def forms(number: int) -> Mapping[str, bytes]:
    """Return the encodings in which a number ≥ 2^32 may have been written, by name."""
    return {
        "little-endian": number.to_bytes(8, "little"),
        "big-endian": number.to_bytes(8, "big"),
        "varint": rpc.Hello(data_epoch=number).SerializeToString()[1:],
        "double": struct.pack("<d", number),
        "big-endian double": struct.pack(">d", number),
        "decimal": str(number).encode(),
        "grouped": f"{number:,}".encode(),
        "hexadecimal": f"{number:x}".encode(),
        "scientific": f"{float(number)!r}".encode(),
    }


def traces(numbers: Iterable[int], places: Mapping[str, bytes]) -> set[tuple[str, str]]:
    """Return (place, form) of each occurrence of one of the numbers."""
    return {
        (place, form)
        for number in numbers
        for form, written in forms(number).items()
        for place, content in places.items()
        if written in content
    }
