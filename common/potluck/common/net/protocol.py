"""Versions and sizes that must be the same on both sides of a connection."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from potluck.common.errors import ProtocolVersionError
from potluck.common.names import is_name

# Versions and sizes -------------------------------------------------------------------------------

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
versions. `check_agreement` compares them before hosts are selected; no other code does.
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


# Agreement on a version ---------------------------------------------------------------------------
# Pure functions.

_SHOWN = 4


def differences(one: Mapping[str, int], other: Mapping[str, int]) -> Mapping[str, tuple[int, int]]:
    """Return the parts whose versions differ, each with both versions; a missing version is 0."""
    return {
        part: (one.get(part, 0), other.get(part, 0))
        for part in (*other, *(part for part in one if part not in other))
        if one.get(part, 0) != other.get(part, 0)
    }


def check_agreement(
    host: Mapping[str, int], coordinator: Mapping[str, int], *, host_name: str
) -> None:
    """Raise ProtocolVersionError unless both report the same versions. The error names both
    versions and the side to upgrade.

    Old releases report only some versions or none. A side that does not report a part's version is
    too old.
    """
    differing = differences(host, coordinator)
    if not differing:
        return
    if all(theirs < ours for theirs, ours in differing.values()):
        remedy = f"upgrade Potluck on host '{host_name}'"
    elif all(theirs > ours for theirs, ours in differing.values()):
        remedy = "upgrade Potluck on the coordinator"
    else:
        remedy = "install the same release on the host and the coordinator"
    parts = "; ".join(
        f"{part if is_name(part) else 'another part'}: version {theirs or 'none'} on the host, "
        f"{ours or 'none'} on the coordinator"
        for part, (theirs, ours) in list(differing.items())[:_SHOWN]
    )
    raise ProtocolVersionError(
        f"host '{host_name}' and the coordinator run different releases of Potluck ({parts}); "
        f"{remedy}",
        host=host_name,
        differing=parts,
    )
