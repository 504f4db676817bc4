"""Model updates as fixed point: a body with the parameters, and a head with weight and metrics.

Body: for each parameter u, round(ω · S · clip(u)) with ω = min(n_k, W) / W, where n_k is the
client's weight (its number of samples), W the header's `weight_bound`, and S the vector's scale.
Head: [min(n_k, W), metric · min(n_k, W) for each metric, number of clipped parameters, 0, 1]. A
client whose training failed sends zeros, and the head [0, …, 0, 1, 1]. The sums give the weighted
mean, Σ body / S · W / Σ min(n_k, W), and the metrics' means; the coordinator never sees n_k or a
single client's metric.

Send differences from the round's model, not weights. Statistics of individual updates (medians,
attention) can't be computed from sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.updates.fixed_point import magnitude, read_words, write_words
from potluck.secagg.protocol.primitives.masks import Words, word_dtype
from potluck.secagg.protocol.rules import Rule, require
from potluck.secagg.protocol.vectors.word_limits import (
    as_signed,
    metric_scale,
    to_integers,
    to_words,
    vector_scale,
)
from potluck.secagg.protocol.wire.messages import Header, SumVector, VectorEncoding


class BodyEncoder:
    """Turns one client's parameters into words, block by block; counts the clipped values.

    Not thread-safe. Several encoders may work on blocks of one vector; then add their `clipped`.
    """

    def __init__(self, header: Header, vector: SumVector, clients: int, weight: int) -> None:
        """clients: number of clients in the roster. weight: the client's n_k ≥ 1, capped at the
        header's bound.
        """
        require(
            vector.encoding is VectorEncoding.FIXED_POINT,
            Rule.INPUT,
            f"vector {vector.name!r} is not a vector of parameters",
        )
        require(weight >= 1, Rule.INPUT, "the weight of an update must be at least 1")
        share = min(weight, header.weight_bound) / header.weight_bound
        self._clip = vector.clip
        self._factor = share * vector_scale(vector, clients)
        self._dtype = word_dtype(vector.modulus_bits)
        self._scratch = np.empty(0)
        self.clipped = 0
        """Number of clipped values so far."""

    def encode(self, block: NDArray[Any], out: Words) -> None:
        """Fill `out` with the words of a block of floating-point values.

        Raises BrokenRuleError (input) for NaN, infinity, blocks of different sizes, or words that
        are not of the vector's type.
        """
        require(
            out.shape == block.shape and out.dtype == self._dtype,
            Rule.INPUT,
            "a block and its words have different lengths or types",
        )
        if self._scratch.size < block.size:
            self._scratch = np.empty(block.size)
        values = self._scratch[: block.size].reshape(block.shape)
        values[...] = block
        largest = magnitude(values)
        require(math.isfinite(largest), Rule.INPUT, "the update contains NaN or infinity")
        if largest > self._clip:
            self.clipped += int(np.count_nonzero(np.abs(values) > self._clip))
            np.clip(values, -self._clip, self._clip, out=values)
        write_words(values, self._factor, as_signed(out))


def encode_head(
    header: Header, clients: int, *, weight: int, metrics: Sequence[float], clipped: int
) -> Words:
    """Return a client's head.

    metrics: in the header's order, clipped to ± its `metric_bound`. Raises BrokenRuleError (input)
    for a weight below 1, NaN, or another number of metrics.
    """
    require(weight >= 1, Rule.INPUT, "the weight of an update must be at least 1")
    require(
        len(metrics) == len(header.metrics),
        Rule.INPUT,
        f"the update has {len(metrics)} metrics, but the sum's header names {len(header.metrics)}",
    )
    require(bool(np.isfinite(metrics).all()), Rule.INPUT, "a metric is NaN or infinite")
    capped = min(weight, header.weight_bound)
    scale = metric_scale(header, clients)
    bound = header.metric_bound
    scaled = [round(min(max(value, -bound), bound) * capped * scale) for value in metrics]
    # The count of clipped values is limited, so that its sum over all clients can't wrap.
    return to_words(np.array([capped, *scaled, min(clipped, 2**40), 0, 1], np.int64), 64)


def encode_failed_head(header: Header) -> Words:
    """Return the head of a client whose training failed: no weight, and counted as failed."""
    zeros = [0] * (len(header.metrics) + 2)
    return to_words(np.array([*zeros, 1, 1], np.int64), 64)


@dataclass(frozen=True, kw_only=True)
class HeadSum:
    """The numbers in a sum of heads.

    weight: sum of the clients' weights; 0 if every training failed. metrics: weighted means, by
    name; empty if the weight is 0. clients: number of clients in the sum. failed: number of clients
    in the sum whose training failed.
    """

    weight: int
    metrics: dict[str, float]
    clipped: int
    failed: int
    clients: int


def decode_head(header: Header, clients: int, total: Words, survivors: int) -> HeadSum:
    """Return the decoded sum of heads. clients: number in the roster; survivors: number in the sum.

    Raises BrokenRuleError (reconstruction) for a sum that the heads of `survivors` clients can't
    have.
    """
    weight, *scaled, clipped, failed, counted = (int(value) for value in to_integers(total))
    trained = survivors - failed
    plausible = counted == survivors and 0 <= failed <= survivors
    plausible = plausible and trained <= weight <= trained * header.weight_bound
    require(
        plausible,
        Rule.RECONSTRUCTION,
        "the sum's head has impossible numbers of clients or an impossible weight",
    )
    scale = metric_scale(header, clients)
    named = zip(header.metrics, scaled, strict=True)
    means = {name: value / scale / weight for name, value in named} if weight else {}
    return HeadSum(weight=weight, metrics=means, clipped=clipped, failed=failed, clients=counted)


class BodyDecoder:
    """Turns sums of bodies into weighted means, block by block."""

    def __init__(self, header: Header, vector: SumVector, clients: int, weight: int) -> None:
        """clients: number of clients in the roster. weight: the sum of weights, from the head."""
        self._factor = header.weight_bound / weight / vector_scale(vector, clients)

    def decode(self, total: Words) -> NDArray[np.float64]:
        """Return the weighted mean of a block of parameters."""
        return read_words(as_signed(total), self._factor)
