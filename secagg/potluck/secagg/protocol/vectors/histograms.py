"""Histograms in a vector of 64-bit words: exact counts, or counts with a share of noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.secagg.protocol.primitives.masks import Words
from potluck.secagg.protocol.rules import Rule, require
from potluck.secagg.protocol.vectors.word_limits import to_integers, to_words
from potluck.secagg.protocol.wire.messages import SumVector, VectorEncoding


def encode_counts(
    counts: Sequence[int], vector: SumVector, noise: Sequence[int] | None = None
) -> Words:
    """Return one client's counts as words. noise: its share of noise, one whole number per count.

    Raises BrokenRuleError (input) for another number of counts than the vector has, a count below 0
    or above the vector's clip, or a vector that is not for counts.
    """
    require(
        vector.encoding is VectorEncoding.COUNTS,
        Rule.INPUT,
        f"vector {vector.name!r} is not a vector of counts",
    )
    require(
        len(counts) == vector.length,
        Rule.INPUT,
        f"the client has {len(counts)} counts, but vector {vector.name!r} needs {vector.length}",
    )
    require(
        all(0 <= count <= vector.clip for count in counts),
        Rule.INPUT,
        f"every count must be from 0 to {vector.clip:.0f}",
    )
    values = np.array([int(count) for count in counts], np.int64)
    if noise is not None:
        require(
            len(noise) == vector.length, Rule.INPUT, "the noise has another length than the counts"
        )
        values += np.array(noise, np.int64)
    return to_words(values, vector.modulus_bits)


def decode_counts(total: Words) -> NDArray[np.int64]:
    """Return the sum of counts, decoded exactly; values below 0 are possible only with noise."""
    return to_integers(total)
