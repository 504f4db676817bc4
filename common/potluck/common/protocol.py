"""Numbers both sides of the wire agree on."""

from __future__ import annotations

PROTOCOL_VERSION = 1
FRAMING_VERSION = 2

CHUNK_BYTES = 1 << 20
"""Size of a chunk of a file on the wire; gRPC refuses messages over 4 MiB."""

MAXIMUM_MESSAGE_BYTES = 4 << 20

SOFTWARE_VERSION = "0.1.0"
