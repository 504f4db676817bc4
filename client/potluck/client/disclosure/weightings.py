"""Reads from a training instruction how exactly the number of samples is disclosed, and whether the
update is masked."""

from __future__ import annotations

from potluck.common.disclosure import Weighting
from potluck.common.errors import ProtocolVersionError
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

_WEIGHTINGS = {
    rpc.WEIGHTING_UNSPECIFIED: Weighting.EXACT,
    rpc.WEIGHTING_EXACT: Weighting.EXACT,
    rpc.WEIGHTING_BUCKETED: Weighting.BUCKETED,
    rpc.WEIGHTING_EQUAL: Weighting.EQUAL,
}


def weighting_of(work: rpc.Train) -> Weighting:
    """Return the requested weighting. Raises ProtocolVersionError for an unknown one."""
    weighting = _WEIGHTINGS.get(work.weighting)
    if weighting is None:
        raise ProtocolVersionError(
            f"this host does not know weighting {work.weighting}; update Potluck on the host"
        )
    return weighting


def is_masked(work: rpc.Train) -> bool:
    """Return True if the update of a training leaves the client only in a secure sum."""
    return work.encoding == transfer_pb2.ENCODING_MASKED_UINT32
