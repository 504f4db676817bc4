"""Updates in fixed point, so that they can be added exactly, in any order and grouping.

A client's difference from the round's model is multiplied by its weight and rounded once, to a
whole number for each parameter: a word. After that, only words are added, so a sum over some
clients and a sum of sums have the same bits. With quantum 2^−s, weight w and unit u (a power of two
near the largest weight), a difference Δ becomes the nearest whole number to Δ · w · 2^s / u, ties
to even. A sum never overflows: see `LARGEST_WORD`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from potluck.common.errors import LayoutError, OutOfBoundsError
from potluck.common.settings.configuration import Settings
from potluck.common.updates.update_report import UpdateReport

MOST_MEMBERS: Final = 2**16
"""Maximum number of clients in a round's sum."""
LARGEST_WORD: Final = 2**47 - 1
"""Largest magnitude of one client's word; the sum of `MOST_MEMBERS` such words stays below 2^63."""
LARGEST_WEIGHT: Final = 2**31
LARGEST_QUANTUM_BITS: Final = 44
MEMBERS_BYTES: Final = 32
"""Length in bytes of the digest of members."""

Words = NDArray[np.int64]


class HostSumSettings(Settings):
    """Settings of the sums that hosts compute over their clients' updates."""

    enabled: bool = Field(
        default=False,
        description="True: each host adds up its clients' updates and sends one exact sum. Needs\n"
        "a strategy and a selector that read no single updates. The coordinator then learns only\n"
        "sums of updates, and each client's report.",
    )
    quantum_bits: int = Field(
        default=30,
        ge=10,
        le=LARGEST_QUANTUM_BITS,
        description="Precision of the sums: changes of parameters are rounded to multiples of\n"
        "2^-quantum_bits, for a client with the weight weight_unit. Eight bits more: up to a\n"
        "quarter more bytes.",
    )
    weight_unit: int = Field(
        default=1024,
        ge=1,
        le=LARGEST_WEIGHT,
        description="Number of samples of a large client, as a power of two. Smaller: finer\n"
        "rounding for all clients, and more bytes.",
    )

    @field_validator("weight_unit")
    @classmethod
    def _power_of_two(cls, unit: int) -> int:
        if unit & (unit - 1):
            raise ValueError("must be a power of two")
        return unit


@dataclass(frozen=True, kw_only=True)
class FixedPointTerms:
    """Settings of updates in fixed point, the same for all clients of a round.

    quantum_bits: s, in [1, 44]. weight_unit: u, a power of two up to 2^31: weights are divided by
    it. weight_cap: maximum weight, used for clients with more samples; from 1 to 2^31.
    """

    quantum_bits: int
    weight_unit: int
    weight_cap: int

    def check(self) -> None:
        """Raise LayoutError if a setting is out of range."""
        unit = self.weight_unit
        if not (
            1 <= self.quantum_bits <= LARGEST_QUANTUM_BITS
            and 1 <= unit <= LARGEST_WEIGHT
            and unit & (unit - 1) == 0
            and 1 <= self.weight_cap <= LARGEST_WEIGHT
        ):
            raise LayoutError(
                f"invalid settings of fixed point: {self.quantum_bits} bits, weights up to "
                f"{self.weight_cap}, and the weight unit {unit}; use 1 to "
                f"{LARGEST_QUANTUM_BITS} bits, weights up to {LARGEST_WEIGHT}, and a power of two "
                "as the unit"
            )

    def weight(self, samples: int) -> int:
        """Return the weight, from 1 to `weight_cap`, of a client that discloses `samples`
        samples."""
        return max(1, min(samples, self.weight_cap))

    @property
    def quantum(self) -> float:
        """Weight difference that a word of 1 stands for, at weight `weight_unit`; exact."""
        return math.ldexp(1.0, -self.quantum_bits)

    def factor(self, weight: int) -> float:
        """Return the factor that multiplies a difference before it is rounded; exact."""
        return weight / self.weight_unit / self.quantum

    def scale(self, total_weight: int) -> float:
        """Return the factor that turns a sum over clients of this total weight into their mean."""
        return self.quantum * self.weight_unit / total_weight


def normalizer_of(report: UpdateReport) -> float:
    """Return the divisor of a client's normalised update, > 0: the reported normaliser, or the
    number of steps if the client reported none."""
    return report.normalizer or float(max(1, report.steps))


# Conversion ---------------------------------------------------------------------------------------
# For sums at the host and for masked sums: a masked update is words plus masks.


def magnitude(values: NDArray[np.float64]) -> float:
    """Return the largest absolute value; NaN if any value is NaN, 0 for no values."""
    # Minimum and maximum are both NaN if any value is.
    return max(-float(values.min(initial=0.0)), float(values.max(initial=0.0)))


def write_words(
    values: NDArray[np.float64], factor: float, out: NDArray[np.signedinteger[Any]]
) -> None:
    """Write round(values · factor) to `out`, ties to even; `values` is overwritten.

    The caller ensures that every result fits into a word of `out`.
    """
    values *= factor
    np.rint(values, out=values)
    np.copyto(out, values, casting="unsafe")


def read_words(words: NDArray[np.signedinteger[Any]], scale: float) -> NDArray[np.float64]:
    """Return words · scale. scale: what a word of 1 stands for."""
    values = words.astype(np.float64)  # faster than np.multiply with another dtype
    values *= scale
    return values


# Sums at the host ---------------------------------------------------------------------------------


def quantise(values: NDArray[np.float64], factor: float, out: Words) -> None:
    """Write a client's words, round(values · factor), to `out`; `values` is overwritten.

    Raises OutOfBoundsError if a value is NaN, or a word's magnitude exceeds `LARGEST_WORD`.
    """
    if not np.rint(magnitude(values) * factor) <= LARGEST_WORD:  # not for NaN either
        raise OutOfBoundsError(
            f"a parameter's difference is NaN or beyond ±{LARGEST_WORD / factor:.6g}, the "
            "maximum in a host's sum; lower training.learning_rate, or host_sums.quantum_bits"
        )
    write_words(values, factor, out)


def check_words(words: Words, members: int) -> None:
    """Raise OutOfBoundsError if a sum over `members` clients can't have these words."""
    most = members * LARGEST_WORD
    if words.size and (int(words.max()) > most or int(words.min()) < -most):
        raise OutOfBoundsError(
            f"a sum over {members} clients has a number beyond ±{most}, the maximum for this "
            "number of clients",
            members=members,
        )


def members_digest(update_ids: Iterable[str]) -> bytes:
    """Return the digest that binds a sum's file to the updates in it: 32 bytes, independent of
    their order.

    SHA-256 over the sorted ids, each preceded by its length.
    """
    digest = hashlib.sha256()
    for update_id in sorted(update_ids):
        text = update_id.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()
