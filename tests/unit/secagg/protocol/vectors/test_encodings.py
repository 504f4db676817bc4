"""Numbers encoded as words: their sums can't overflow and equal plain sums."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.secure_sums import BODY, COUNTS, HEAD, Federation

from potluck.secagg.protocol import BrokenRuleError, Header, Purpose, Rule, SumVector
from potluck.secagg.protocol.vectors.histograms import decode_counts, encode_counts
from potluck.secagg.protocol.vectors.updates import (
    BodyDecoder,
    BodyEncoder,
    decode_head,
    encode_head,
)
from potluck.secagg.protocol.vectors.word_limits import (
    check_vector,
    to_integers,
    to_words,
    vector_scale,
)

BODY_64 = replace(BODY, modulus_bits=64)
VALIDATION = replace(BODY, modulus_bits=64, scale=2.0**40)


def header(**changes: Any) -> Header:
    return Federation(clients=6, purpose=Purpose.UPDATE).header(**changes)


def encoded(vector: SumVector, clients: int, values: np.ndarray[Any, Any], weight: int) -> Any:
    out = np.empty(values.shape, f"<u{vector.modulus_bits // 8}")
    BodyEncoder(header(vectors=(vector, HEAD)), vector, clients, weight).encode(values, out)
    return out


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.integers(0, 2**40), min_size=5, max_size=5),
        min_size=1,
        max_size=8,
    )
)
def test_sums_of_encoded_counts_are_exact(counts: list[list[int]]) -> None:
    words = np.sum([encode_counts(each, COUNTS) for each in counts], axis=0, dtype="<u8")
    assert decode_counts(words).tolist() == [sum(column) for column in zip(*counts, strict=True)]


def test_encoded_counts_with_noise_may_be_negative() -> None:
    words = encode_counts([0, 1, 2, 3, 4], COUNTS, noise=[-3, 0, 5, -1, 0])
    assert decode_counts(words).tolist() == [-3, 1, 7, 2, 4]


def test_sum_of_the_largest_counts_of_the_maximum_of_clients_does_not_overflow() -> None:
    words = encode_counts([2**40] * 5, COUNTS)
    total = words * np.uint64(2**16)
    assert decode_counts(total).tolist() == [2**56] * 5
    check_vector(COUNTS, header(), 2**16)
    with pytest.raises(BrokenRuleError, match="more than the maximum"):
        check_vector(COUNTS, header(), 2**16 + 1)


@pytest.mark.parametrize("counts", [[1, 2], [1, 2, 3, 4, -1], [0, 0, 0, 0, 2**40 + 1]])
def test_encoding_counts_out_of_bounds_is_refused(counts: list[int]) -> None:
    with pytest.raises(BrokenRuleError) as refused:
        encode_counts(counts, COUNTS)
    assert refused.value.rule is Rule.INPUT


@pytest.mark.parametrize("vector", [BODY, BODY_64, VALIDATION])
@pytest.mark.parametrize("clients", [1, 2, 3, 5, 100, 4097, 2**16])
@pytest.mark.parametrize("clip", [0.25, 0.1, 1e-30, 1e30, 3.0])
def test_sums_of_extreme_values_do_not_overflow(
    vector: SumVector, clients: int, clip: float
) -> None:
    vector = replace(vector, clip=clip)
    if vector.scale and clients * clip * vector.scale > 2**62:
        with pytest.raises(BrokenRuleError) as refused:
            check_vector(vector, header(), clients)
        assert refused.value.rule is Rule.WRAP
        return
    check_vector(vector, header(), clients)
    extremes = np.array([clip, -clip, 2 * clip, -2 * clip], np.float64)
    words = encoded(vector, clients, extremes, 10**9)
    value, negative, *clipped = (int(each) for each in to_integers(words))
    assert value == -negative
    assert clipped == [value, negative]
    bound = 2 ** (vector.modulus_bits - 1) - 1
    assert 0 <= clients * value <= bound
    # The scale is the largest possible: one more bit would not fit.
    assert vector.scale or clients * value > bound // 4 or clients > 2**29
    total = to_words(np.array([clients * value, -clients * value]), vector.modulus_bits)
    assert to_integers(total).tolist() == [clients * value, -clients * value]


@settings(deadline=None)
@given(
    vector=st.sampled_from([BODY, BODY_64]),
    clients=st.integers(1, 2**16),
    clip=st.floats(2.0**-9, 2.0**9),
    scale=st.floats(2.0**-9, 2.0**60),
)
def test_accepted_vector_can_not_overflow(
    vector: SumVector, clients: int, clip: float, scale: float
) -> None:
    vector, wraps = replace(vector, clip=clip, scale=scale), True
    with suppress(BrokenRuleError):
        check_vector(vector, header(), clients)
        wraps = False
    assume(not wraps)
    [value] = to_integers(encoded(vector, clients, np.array([clip]), 1000)).tolist()
    assert clients * value <= 2 ** (vector.modulus_bits - 1) - 1


@pytest.mark.parametrize(
    ("vector", "clients", "bound"), [(BODY, 10, 1e-7), (BODY, 1000, 1e-5), (VALIDATION, 10, 1e-10)]
)
def test_decoded_mean_equals_the_plain_weighted_mean(
    vector: SumVector, clients: int, bound: float
) -> None:
    generator = np.random.Generator(np.random.PCG64(1))
    updates = generator.normal(0, 0.05, (clients, 4000)).astype(np.float32).clip(-0.25, 0.25)
    weights = generator.integers(1, 1000, clients)
    agreed = header(vectors=(vector, HEAD))
    total: Any = 0
    heads: Any = 0
    for update, weight in zip(updates, weights.tolist(), strict=True):
        total = total + encoded(vector, clients, update, weight)
        heads = heads + encode_head(agreed, clients, weight=weight, metrics=[0.5], clipped=0)
    said = decode_head(agreed, clients, heads, clients)
    assert (said.weight, said.clients, said.clipped) == (weights.sum(), clients, 0)
    assert said.metrics["accuracy"] == pytest.approx(0.5, abs=1e-9)
    mean = BodyDecoder(agreed, vector, clients, said.weight).decode(total)
    plain = np.average(updates.astype(np.float64), axis=0, weights=weights)
    error = np.sqrt(np.mean((mean - plain) ** 2)) / np.sqrt(np.mean(plain**2))
    assert error <= bound
    # Rounding changes each client's value by at most half a unit.
    unit = agreed.weight_bound / said.weight / vector_scale(vector, clients)
    assert np.abs(mean - plain).max() <= 0.51 * clients * unit


def test_weights_above_the_bound_are_lowered_to_it() -> None:
    agreed = header()
    assert np.array_equal(
        encoded(BODY, 6, np.array([0.1]), 5000), encoded(BODY, 6, np.array([0.1]), 1000)
    )
    head = encode_head(agreed, 6, weight=5000, metrics=[7.0], clipped=3)
    said = decode_head(agreed, 6, head, 1)
    assert (said.weight, said.metrics, said.clipped) == (1000, {"accuracy": 1.0}, 3)


def test_clipped_values_of_an_update_are_counted() -> None:
    encoder = BodyEncoder(header(), BODY, 6, 10)
    out = np.empty(4, "<u4")
    encoder.encode(np.array([0.25, 0.26, -3.0, 0.0], np.float32), out)
    assert encoder.clipped == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_encoding_a_non_finite_update_is_refused(bad: float) -> None:
    with pytest.raises(BrokenRuleError) as refused:
        encoded(BODY, 6, np.array([0.0, bad], np.float32), 10)
    assert refused.value.rule is Rule.INPUT
    with pytest.raises(BrokenRuleError):
        encode_head(header(), 6, weight=1, metrics=[bad], clipped=0)


def test_updates_of_wrong_length_or_metrics_are_refused() -> None:
    encoder = BodyEncoder(header(), BODY, 6, 10)
    with pytest.raises(BrokenRuleError, match="length"):
        encoder.encode(np.zeros(3), np.zeros(4, "<u4"))
    with pytest.raises(BrokenRuleError, match="length"):
        encoder.encode(np.zeros(3), np.zeros(3, "<u8"))
    with pytest.raises(BrokenRuleError, match="weight"):
        BodyEncoder(header(), BODY, 6, 0)
    with pytest.raises(BrokenRuleError, match="not a vector of parameters"):
        BodyEncoder(header(), HEAD, 6, 1)
    with pytest.raises(BrokenRuleError, match="not a vector of counts"):
        encode_counts([1], BODY)
    with pytest.raises(BrokenRuleError, match="has 0 metrics"):
        encode_head(header(), 6, weight=1, metrics=[], clipped=0)


def test_sum_head_with_a_wrong_client_count_is_refused() -> None:
    agreed = header()
    head = encode_head(agreed, 6, weight=10, metrics=[0.0], clipped=0)
    with pytest.raises(BrokenRuleError) as refused:
        decode_head(agreed, 6, head, 2)
    assert refused.value.rule is Rule.RECONSTRUCTION


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_bound": 0},
        {"weight_bound": 2**41},
        {"weight_bound": 2**40, "metric_bound": 2.0**40},
        {"metric_bound": float("inf")},
        {"metric_bound": -1.0},
        {"metrics": ()},
    ],
)
def test_sum_head_that_could_overflow_is_refused(changes: dict[str, Any]) -> None:
    check_vector(HEAD, header(), 6)
    with pytest.raises(BrokenRuleError) as refused:
        check_vector(HEAD, header(**changes), 6)
    assert refused.value.rule is Rule.WRAP
