"""The format of masked updates: their vectors of words, and their files.

A client's update goes into a secure sum (`potluck.secagg.protocol`) as vectors of words: `body`,
the weighted difference from the round's model in fixed point; `head`, its weight and its training's
numbers; and a vector for each auxiliary. Its file is a safetensors file with a tensor of words for
each vector. All floating-point tensors are one vector in the model's order
(`potluck.common.tensors.flat`). Other tensors are not sent; the model's stay unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from potluck.common.run_file.run_settings import MaskingSettings
from potluck.common.tensors.layout import Layout
from potluck.common.updates.sum_files import BODY, vectors_of
from potluck.secagg.protocol import SumVector, VectorEncoding
from potluck.secagg.protocol.vectors.word_limits import HEAD_EXTRA

HEAD: Final = "head"
WITHIN: Final = "within"
"""Vector of one number that counts the updates within the clip of a run with noise."""
LOSS: Final = "loss"
"""Name, in the head, of the mean training loss over the last pass."""
NORMALIZER: Final = "normalizer"
"""Name of the normaliser (`potluck.common.learning.local_steps`) in the head."""
METRIC_BOUND: Final = 1e6
"""Maximum of a metric's absolute value, far above usual losses and step counts; larger values are
clipped.
"""


NOISE_DEVIATIONS: Final = 12
"""Number of standard deviations of noise for which a sum's words have room."""
_NOISY_SCALE: Final = 2.0**40
"""Largest word of a noisy update in a vector of 64 bits; doubles represent such words exactly."""


@dataclass(frozen=True, kw_only=True)
class NoiseInSums:
    """The noise that clients add to their updates in shares.

    clip: maximum L2 norm of an update, > 0. multiplier: standard deviation of the noise in a sum,
    in units of `longest`, > 0. contributors: number of clients whose shares make the whole noise, ≥
    1. quorum: minimum number of clients in a sum. counted_share: fraction of the privacy loss for
    the count in the vector `WITHIN`; 0 without that vector.
    """

    clip: float
    multiplier: float
    contributors: int
    quorum: int
    counted_share: float = 0.0

    @property
    def longest(self) -> float:
        """Maximum L2 norm of an update's vector, extended by its number in the vector `WITHIN`."""
        return self.clip / math.sqrt(1 - self.counted_share)

    @property
    def bound(self) -> float:
        """Maximum absolute value that a client may add to a sum, so that no noisy sum can wrap.

        With n clients, the noise's variance is at most n / contributors · (multiplier · longest)².
        """
        several = math.sqrt(self.quorum * self.contributors)
        return self.longest * (1 + NOISE_DEVIATIONS * self.multiplier / several)


def metric_names(*, normalized: bool, noisy: bool = False) -> tuple[str, ...]:
    """Return the names of the head's numbers after the weight, in order; none with noise."""
    if noisy:
        return ()
    return (LOSS, NORMALIZER) if normalized else (LOSS,)


def vector_lengths(
    parameters: int,
    metrics: Sequence[str],
    auxiliaries: Iterable[str],
    *,
    counts: bool = False,
) -> Mapping[str, int]:
    """Return the number of words in each vector of an update, by the vector's name.

    parameters: length of the floating-point vector. counts: True for a vector `WITHIN`.
    """
    # Files depend on this order: body, head, auxiliaries, count.
    first = {BODY: parameters, HEAD: HEAD_EXTRA + len(metrics)}
    return {**first, **vectors_of(parameters, auxiliaries), **({WITHIN: 1} if counts else {})}


def sum_vectors(
    lengths: Mapping[str, int], masking: MaskingSettings, noise: NoiseInSums | None = None
) -> tuple[SumVector, ...]:
    """Return the vectors of a run's updates, with encoding, scale and clip."""
    clip = masking.clip if noise is None else noise.bound
    scale = 0.0 if noise is None or masking.bits == 32 else _NOISY_SCALE / clip
    return tuple(
        SumVector(name=name, length=length, modulus_bits=64, encoding=VectorEncoding.HEAD, clip=1.0)
        if name == HEAD
        else SumVector(
            name=name,
            length=length,
            modulus_bits=masking.bits,
            encoding=VectorEncoding.FIXED_POINT,
            clip=clip,
            scale=scale,
        )
        for name, length in lengths.items()
    )


def file_layout(vectors: Iterable[SumVector]) -> Layout:
    """Return the layout of a masked update's file: a tensor of words for each vector."""
    return Layout.place(
        [(vector.name, f"U{vector.modulus_bits}", (vector.length,)) for vector in vectors]
    )
