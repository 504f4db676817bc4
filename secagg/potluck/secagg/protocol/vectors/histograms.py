"""Histograms in a lane of 64-bit words: exact counts, or counts with a share of noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.secagg.protocol.primitives.masks import Words
from potluck.secagg.protocol.rules import Rule, require
from potluck.secagg.protocol.vectors.fixed_point import to_integers, to_words
from potluck.secagg.protocol.wire.messages import Lane, LaneEncoding


def encode_counts(counts: Sequence[int], lane: Lane, noise: Sequence[int] | None = None) -> Words:
    """Return one client's counts as words. noise: its share of noise, one whole number per count.

    Raises BrokenRuleError (input) for another number of counts than the lane has, a count below 0
    or above the lane's clip, or a lane that is not for counts.
    """
    require(
        lane.encoding is LaneEncoding.COUNTS,
        Rule.INPUT,
        f"lane {lane.name!r} is not a lane of counts",
    )
    require(
        len(counts) == lane.length,
        Rule.INPUT,
        f"the client has {len(counts)} counts, but lane {lane.name!r} needs {lane.length}",
    )
    require(
        all(0 <= count <= lane.clip for count in counts),
        Rule.INPUT,
        f"every count must be from 0 to {lane.clip:.0f}",
    )
    values = np.array([int(count) for count in counts], np.int64)
    if noise is not None:
        require(
            len(noise) == lane.length, Rule.INPUT, "the noise has another length than the counts"
        )
        values += np.array(noise, np.int64)
    return to_words(values, lane.modulus_bits)


def decode_counts(total: Words) -> NDArray[np.int64]:
    """Return the sum of counts, decoded exactly; values below 0 are possible only with noise."""
    return to_integers(total)
