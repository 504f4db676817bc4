"""The noise of answers fits their sensitivity, and a run's ε covers them."""

import math
import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.client.question import BoundedSums
from potluck.privacy.host.answer_noise import noisy_means, rounded
from potluck.privacy.planned_training import ANSWER_SHARE, answer_noise, rdp_of_answers
from potluck.privacy.rdp_filter import epsilon_spent
from potluck.rpc.v1 import coordinator_pb2 as rpc

DIRECTIONS = st.lists(st.floats(-1, 1), min_size=1, max_size=6)


@given(
    records=st.lists(st.floats(0, 1e6), min_size=6, max_size=6),
    direction=DIRECTIONS,
    sensitivity=st.floats(1e-6, 1e4),
    samples=st.integers(1, 10**6),
    public=st.booleans(),
)
def test_rounded_sums_of_neighbours_differ_by_at_most_the_sensitivity(
    records: list[float], direction: list[float], sensitivity: float, samples: int, public: bool
) -> None:
    scale = sensitivity / max(1.0, math.hypot(*direction))
    some = {f"n-{place}": sensitivity * records[place] for place in range(len(direction))}
    others = {
        name: value + scale * step
        for (name, value), step in zip(some.items(), direction, strict=True)
    }
    one, other = (
        rounded(BoundedSums(values=each, sensitivity=sensitivity), count, public=public)
        for each, count in ((some, samples), (others, samples if public else samples + 1))
    )
    squared = sum((a - b) ** 2 for a, b in zip(one.steps, other.steps, strict=True))
    assert squared <= one.squared_sensitivity


@pytest.mark.parametrize("public", [True, False])
def test_answer_noise_has_the_stated_deviation_and_the_correct_mean(public: bool) -> None:
    sums = BoundedSums(values={"loss": 1500.0}, sensitivity=2.0, public={"seconds": 7.0})
    random = Random(7).randbytes
    drawn = [
        noisy_means(sums, 1000, public=public, noise_multiplier=8.0, random=random)
        for _ in range(600)
    ]
    assert all(each["seconds"] == 7.0 for each in drawn)
    losses = [each["loss"] for each in drawn]
    # To first order, noise on the number of samples adds a variance proportional to mean². It also
    # increases the noise of both by √2.
    deviation = 16 / 1000 if public else math.sqrt(2) * 16 / 1000 * math.hypot(1, 1.5 / 2)
    assert statistics.fmean(losses) == pytest.approx(1.5, abs=6 * deviation / math.sqrt(600))
    assert statistics.stdev(losses) == pytest.approx(deviation, rel=0.2)


def test_noisy_means_stay_within_the_range_of_a_record() -> None:
    sums = BoundedSums(values={"a": 0.0, "b": 5.0}, sensitivity=1.0)
    random = Random(7).randbytes
    for _ in range(50):
        found = noisy_means(sums, 5, public=False, noise_multiplier=30.0, random=random)
        assert set(found) == {"a", "b"}
        assert all(0 <= value <= 1 for value in found.values())


def test_answers_without_their_own_noise_use_a_quarter_of_the_epsilon() -> None:
    asked = rpc.Privacy(epsilon=4.0, delta=1e-5, answers=20)
    spent = epsilon_spent(rdp_of_answers(asked), 1e-5)
    assert 0.99 * ANSWER_SHARE * 4.0 < spent <= ANSWER_SHARE * 4.0
    asked.answer_noise_multiplier = 30.0
    assert answer_noise(asked) == 30.0
