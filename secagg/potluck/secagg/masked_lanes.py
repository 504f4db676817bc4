"""Masked updates: their lanes of numbers, and the form of their files.

A client's update goes into a secure sum (`potluck.secagg.protocol`) as lanes of words: `body`, the
weighted difference from the round's model in fixed point; `head`, its weight and its training's
numbers; and a lane for each auxiliary. Its file is a safetensors file with a tensor of words for
each lane. All floating-point tensors are one vector in the model's order
(`potluck.common.tensors.flat`); others are not sent: the model keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from potluck.common.run_file.run_settings import MaskingSettings
from potluck.common.tensors.layout import Layout
from potluck.secagg.protocol import Lane, LaneEncoding
from potluck.secagg.protocol.vectors.fixed_point import HEAD_EXTRA

BODY: Final = "body"
HEAD: Final = "head"
AUXILIARY: Final = "auxiliary/"
"""Prefix of the lane of an auxiliary, before its name."""
LOSS: Final = "loss"
"""Name, in the head, of the mean training loss over the last pass."""
NORMALIZER: Final = "normalizer"
"""Name of the normaliser (`potluck.common.learning.local_steps`) in the head."""
METRIC_BOUND: Final = 1e6
"""Maximum of a metric's absolute value; larger ones are clipped. Far above any loss or step count.
"""


def metric_names(*, normalized: bool) -> tuple[str, ...]:
    """Return the numbers in the head besides the weight, in their order."""
    return (LOSS, NORMALIZER) if normalized else (LOSS,)


def lane_lengths(
    parameters: int, metrics: Sequence[str], auxiliaries: Iterable[str]
) -> Mapping[str, int]:
    """Return the number of words in each lane of an update, by the lane's name.

    parameters: length of the floating-point vector.
    """
    beside = {f"{AUXILIARY}{name}": parameters for name in sorted(auxiliaries)}
    return {BODY: parameters, HEAD: HEAD_EXTRA + len(metrics), **beside}


def lanes_of(lengths: Mapping[str, int], masking: MaskingSettings) -> tuple[Lane, ...]:
    """Return the lanes that a run asks for."""
    return tuple(
        Lane(
            name=name,
            length=length,
            modulus_bits=64 if name == HEAD else masking.bits,
            encoding=LaneEncoding.HEAD if name == HEAD else LaneEncoding.FIXED_POINT,
            clip=1.0 if name == HEAD else masking.clip,
        )
        for name, length in lengths.items()
    )


def file_layout(lanes: Iterable[Lane]) -> Layout:
    """Return the layout of a masked update's file: a tensor of words for each lane."""
    return Layout.place([(lane.name, f"U{lane.modulus_bits}", (lane.length,)) for lane in lanes])
