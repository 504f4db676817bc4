"""Masked updates: their settings in a run file, their lanes of numbers, the form of their files.

A client's update goes into a secure sum (`potluck.common.secagg`) as lanes of words: `body`, the
weighted difference from the round's model in fixed point; `head`, its weight and its training's
numbers; and a lane for each auxiliary. Its file is a safetensors file with a tensor of words for
each lane. All floating-point tensors are one vector in the model's order
(`potluck.common.tensors.flat`); others are not sent: the model keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from pydantic import Field

from potluck.common.secagg import Lane, LaneEncoding
from potluck.common.secagg.policy.sum_policy import LEAST_HOSTS, SMALLEST_LEAST_HOSTS
from potluck.common.secagg.vectors.fixed_point import HEAD_EXTRA
from potluck.common.settings.configuration import Settings
from potluck.common.tensors.layout import Layout

BODY: Final = "body"
HEAD: Final = "head"
AUXILIARY: Final = "auxiliary/"
"""Prefix of the lane of an auxiliary, before its name."""
LOSS: Final = "loss"
"""Mean training loss over the last pass, in the head."""
NORMALIZER: Final = "normalizer"
"""Name of the normaliser (`potluck.common.learning.local_steps`) in the head."""
CLAIM: Final = (
    "masks hide each update in the sum of its round from a coordinator that keeps to the protocol; "
    "they promise nothing against operators, against a coordinator that lies, or over several "
    "rounds and runs"
)
"""All that may be claimed of updates with masks and without noise."""
METRIC_BOUND: Final = 1e6
"""Larger numbers are cut off; far beyond any loss or any number of steps."""


class MaskingSettings(Settings):
    """Settings of masked updates and their sums."""

    clip: float = Field(
        default=4.0,
        gt=0,
        le=1e6,
        allow_inf_nan=False,
        description="The most a single parameter may change in a round; larger changes are cut\n"
        "off there, and the run says how many were. Smaller: finer steps.",
    )
    weight_cap: int = Field(
        default=10_000,
        ge=1,
        le=2**31,
        description="A client with more samples than this counts as one with so many. Set it a\n"
        "little above the largest number of samples: the smaller, the finer steps.",
    )
    bits: Literal[32, 64] = Field(
        default=32,
        description="Of each masked parameter; 64 doubles uploads, and only proves that 32 do.",
    )
    hosts: int = Field(
        default=LEAST_HOSTS,
        ge=SMALLEST_LEAST_HOSTS,
        description="Fewest distinct hosts in a round's sum; clients refuse less than their own.",
    )
    colluding_hosts: int | None = Field(
        default=None,
        ge=0,
        description="Hosts assumed to work with the coordinator; unset: a third of them.",
    )
    stage_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="How long to wait for slow clients in each short exchange of messages; for\n"
        "their keys, before which they fetch the model, they have half of\n"
        "round.deadline_seconds.",
    )

    @property
    def fewest_hosts(self) -> int:
        """The number of hosts that a round's clients must be on: at least one does not collude."""
        return max(self.hosts, (self.colluding_hosts or 0) + 1)


def metric_names(*, normalized: bool) -> tuple[str, ...]:
    """Return the numbers in the head besides the weight, in their order."""
    return (LOSS, NORMALIZER) if normalized else (LOSS,)


def lane_lengths(
    parameters: int, metrics: Sequence[str], auxiliaries: Iterable[str]
) -> Mapping[str, int]:
    """Words of each lane of an update, by its name. parameters: of the floating-point vector."""
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
