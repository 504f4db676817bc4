"""Protocol numbers on which both sides of the wire agree."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

VERSIONS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "protocol": 1,  # messages on the control stream
        "framing": 3,  # files on their way: their frames and digests
        "encoding": 1,  # tensors in files, whole, as deltas and quantised
        "private-training": 1,  # noise for single records in a training
        "secure-sum": 4,  # messages of secure sums, and masked updates
    }
)
"""Parts that both sides must do alike, each with the version of this software. A change that the
other side must know of raises a number, or adds a line: hello and welcome carry them all
(`version_agreement.py`), and nothing else compares them before hosts are selected."""

PROTOCOL_VERSION: Final = VERSIONS["protocol"]
FRAMING_VERSION: Final = VERSIONS["framing"]
SECURE_SUM_VERSION: Final = VERSIONS["secure-sum"]

CHUNK_BYTES = 1 << 20
"""Size of a chunk of a file on the wire; gRPC refuses messages over 4 MiB."""

LEAST_CHUNK_BYTES = 16 << 10
"""On links that break again and again. A chunk that did not arrive whole did not arrive."""

MAXIMUM_MESSAGE_BYTES = 4 << 20
