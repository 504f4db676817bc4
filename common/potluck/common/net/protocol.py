"""Versions and sizes on which both sides of a connection must agree."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

VERSIONS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "protocol": 1,  # messages on the control stream
        "framing": 3,  # transfer of files: frames and digests
        "encoding": 1,  # tensors in files, whole, as deltas and quantised
        "private-training": 1,  # noise for single records in a training
        "private-answers": 1,  # noise for single records in answers to questions
        "secure-sum": 4,  # messages of secure sums, and masked updates
    }
)
"""Parts of the protocol that both sides must implement alike, each with its version in this
software.

An incompatible change must raise a number or add a line. The messages hello and welcome contain all
versions. `version_agreement.py` compares them before hosts are selected; no other code does.
"""

PROTOCOL_VERSION: Final = VERSIONS["protocol"]
FRAMING_VERSION: Final = VERSIONS["framing"]
SECURE_SUM_VERSION: Final = VERSIONS["secure-sum"]

CHUNK_BYTES = 1 << 20
"""Size of a chunk of a file on the wire; gRPC refuses messages over 4 MiB."""

LEAST_CHUNK_BYTES = 16 << 10
"""Minimum size of a chunk, for connections that break often: a chunk that arrives only in part is
lost."""

MAXIMUM_MESSAGE_BYTES = 4 << 20
