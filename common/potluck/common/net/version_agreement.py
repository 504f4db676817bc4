"""Compares the protocol versions of a host and a coordinator. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from potluck.common.errors import ProtocolVersionError
from potluck.common.names import is_name

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

    Old releases report only some versions or none. If a side does not report a part's version, it
    is too old.
    """
    differing = differences(host, coordinator)
    if not differing:
        return
    if all(theirs < ours for theirs, ours in differing.values()):
        remedy = f"upgrade Potluck on host '{host_name}'"
    elif all(theirs > ours for theirs, ours in differing.values()):
        remedy = "upgrade Potluck on the coordinator"
    else:
        remedy = "install the same release of Potluck on both"
    parts = "; ".join(
        f"{part if is_name(part) else 'another part'}: version {theirs or 'none'} on the host, "
        f"{ours or 'none'} on the coordinator"
        for part, (theirs, ours) in list(differing.items())[:_SHOWN]
    )
    raise ProtocolVersionError(
        f"host '{host_name}' and the coordinator are of different releases ({parts}); {remedy}",
        host=host_name,
        differing=parts,
    )
