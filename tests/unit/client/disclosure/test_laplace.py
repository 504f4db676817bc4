"""Discrete Laplace noise: its distribution, what it hides, and what it does not."""

import math
import random
import secrets
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from support.populations import population, rounds

from potluck.client.disclosure.laplace import (
    Adjacency,
    Epsilon,
    discrete_laplace,
    exact_epsilon,
    noisy_counts,
    sensitivity,
)
from potluck.common.errors import ConfigurationError
from potluck.server.selectors.fedentopt import FedEntOpt
from potluck.server.selectors.parts.label_entropy import bits

RATES = [Fraction(1, 2), Fraction(1, 4), Fraction(3, 7), Fraction(5, 2), Fraction(1)]


def samples(rate: Fraction, count: int, seed: int = 0) -> list[int]:
    randomness = random.Random(seed)
    return [discrete_laplace(rate, randomness) for _ in range(count)]


def probability(rate: Fraction, value: int) -> float:
    return math.tanh(float(rate) / 2) * math.exp(-float(rate) * abs(value))


@pytest.mark.parametrize("rate", RATES)
def test_noise_samples_follow_the_probability_mass_function(rate: Fraction) -> None:
    count = 40_000
    drawn = Counter(samples(rate, count))
    limit = 0
    while count * probability(rate, limit + 1) >= 10:
        limit += 1
    inside = list(range(-limit, limit + 1))
    expected = [count * probability(rate, value) for value in inside]
    observed = [drawn[value] for value in inside]
    tail = (count - sum(expected)) / 2
    below = sum(times for value, times in drawn.items() if value < -limit)
    above = sum(times for value, times in drawn.items() if value > limit)
    test = stats.chisquare([below, *observed, above], [tail, *expected, tail])
    assert test.pvalue > 0.001


@pytest.mark.parametrize("rate", RATES)
def test_probability_mass_function_sums_to_1(rate: Fraction) -> None:
    assert sum(probability(rate, value) for value in range(-300, 301)) == pytest.approx(1)


def test_noise_is_symmetric_around_zero() -> None:
    drawn = Counter(samples(Fraction(1, 4), 40_000, seed=1))
    positive = sum(times for value, times in drawn.items() if value > 0)
    negative = sum(times for value, times in drawn.items() if value < 0)
    assert stats.binomtest(positive, positive + negative).pvalue > 0.001
    assert 0 < drawn[0] < positive


def test_noise_scale_at_epsilon_one_half_equals_the_worked_example() -> None:
    """A worked example: b = 2 for add-remove at ε = 0.5, and 4 for replace."""
    for adjacency, scale in (("add-remove", 2), ("replace", 4)):
        drawn = noisy_counts(
            [100] * 40_000,
            epsilon=0.5,
            adjacency="replace" if adjacency == "replace" else "add-remove",
            randomness=random.Random(2),
        )
        # E|X| of the discrete law of scale b is 1/sinh(1/b), just under b
        mean = np.abs(np.array(drawn) - 100).mean()
        assert mean == pytest.approx(1 / math.sinh(1 / scale), rel=0.03)
        assert mean < scale


def test_same_randomness_gives_the_same_noisy_counts() -> None:
    def release(seed: int) -> list[int]:
        return noisy_counts(
            [5, 0, 7], epsilon=0.3, adjacency="replace", randomness=random.Random(seed)
        )

    assert release(3) == release(3)
    assert len({tuple(release(seed)) for seed in range(20)}) > 10


def test_noise_can_use_randomness_of_the_operating_system() -> None:
    noisy = noisy_counts(
        [1000, 0], epsilon=1, adjacency="add-remove", randomness=secrets.SystemRandom()
    )
    assert len(noisy) == 2
    assert abs(noisy[0] - 1000) < 100  # exceeded with probability 10^-43


def recovered_labels(epsilon: Epsilon, *, seed: int, clients: int = 150) -> float:
    """Return the share of correct guesses whether a client has a label, by a threshold of 50.
    Clients have 2 of 10 labels, 250 samples of each."""
    randomness = random.Random(seed)
    right = 0
    for _ in range(clients):
        held = randomness.sample(range(10), 2)
        counts = [250 if label in held else 0 for label in range(10)]
        noisy = noisy_counts(counts, epsilon=epsilon, adjacency="add-remove", randomness=randomness)
        right += sum((count > 50) == (label in held) for label, count in enumerate(noisy))
    return right / (clients * 10)


PUBLISHED = [(0.5, 1.0), (0.1, 0.996), (0.01, 0.723)]
"""Published pairs of ε and accuracy, for 100 clients × 10 labels."""


def exact_accuracy(epsilon: float) -> float:
    """Return the expected share of correct guesses. A guess is wrong if the noise is ≥ 51 for a
    label without samples, or ≤ −200 for a label with samples."""
    decay = math.exp(-epsilon)
    return 1 - (0.8 * decay**51 + 0.2 * decay**200) / (1 + decay)


@pytest.mark.parametrize("epsilon", [epsilon for epsilon, _ in PUBLISHED])
def test_labels_of_a_client_are_recovered_from_noisy_counts(epsilon: float) -> None:
    """Noise per record does not hide which labels a client holds."""
    accuracy = exact_accuracy(epsilon)
    deviation = math.sqrt(accuracy * (1 - accuracy) / 1500)
    found = recovered_labels(epsilon, seed=4)
    assert found == pytest.approx(accuracy, abs=4 * deviation + 1e-9)


@pytest.mark.parametrize(("epsilon", "published"), PUBLISHED)
def test_published_recovery_accuracies_agree_with_the_noise_distribution(
    epsilon: float, published: float
) -> None:
    accuracy = exact_accuracy(epsilon)
    deviation = math.sqrt(accuracy * (1 - accuracy) / 1000)
    assert published == pytest.approx(accuracy, abs=2 * deviation + 1e-9)


@pytest.mark.parametrize(("epsilon", "entropy"), [(0.5, 3.289), (0.01, 3.118)])
def test_cohort_entropy_with_noisy_counts_equals_the_worked_example(
    epsilon: float, entropy: float
) -> None:
    """A worked example: FedEntOpt, κ = 10, Q = 70, 100 clients with 250 of each of two labels."""
    generator, randomness = np.random.default_rng(0), random.Random(0)
    counts = np.zeros((100, 10), dtype=np.int64)
    for client, row in enumerate(counts):
        row[[client % 10, (client + int(generator.integers(1, 10))) % 10]] = 250
    found = []
    for _ in range(8):
        noisy = noisy_counts(
            counts.ravel().tolist(), epsilon=epsilon, adjacency="add-remove", randomness=randomness
        )
        federation = population(100, classes=10, label_counts=np.reshape(noisy, counts.shape))
        chosen = rounds(FedEntOpt(buffer=70), federation, 10, 60)
        found += [bits(counts[selection.rows].sum(axis=0).astype(float)) for selection in chosen]
    assert np.mean(found) == pytest.approx(entropy, abs=0.03)


@pytest.mark.parametrize(("adjacency", "neighbour"), [("add-remove", [3, 2]), ("replace", [3, 1])])
def test_measured_privacy_loss_of_neighbouring_histograms_is_at_most_epsilon(
    adjacency: Adjacency, neighbour: list[int]
) -> None:
    """No answer is more than e^ε times as likely as for the neighbour; the largest ratio is close
    to e^ε."""
    epsilon, count = 1.0, 60_000

    def answers(counts: list[int], seed: int) -> Counter[tuple[int, ...]]:
        randomness = random.Random(seed)
        return Counter(
            tuple(noisy_counts(counts, epsilon=epsilon, adjacency=adjacency, randomness=randomness))
            for _ in range(count)
        )

    one, other = answers([2, 2], 5), answers(neighbour, 6)
    losses = []
    for answer in one.keys() & other.keys():
        if min(one[answer], other[answer]) < 200:
            continue
        loss = abs(math.log(one[answer] / other[answer]))
        error = math.sqrt(1 / one[answer] + 1 / other[answer])
        losses.append(loss)
        assert loss < epsilon + 4 * error
    assert max(losses) > 0.9 * epsilon


def test_replace_adjacency_has_twice_the_sensitivity_of_add_remove() -> None:
    assert (sensitivity("add-remove"), sensitivity("replace")) == (1, 2)


@given(st.lists(st.integers(0, 1000), max_size=20), st.fractions(Fraction(1, 1000), 20))
def test_noisy_counts_of_any_histogram_are_integers_of_the_same_length(
    counts: list[int], epsilon: Fraction
) -> None:
    noisy = noisy_counts(
        counts, epsilon=epsilon, adjacency="add-remove", randomness=random.Random(0)
    )
    assert len(noisy) == len(counts)
    assert all(type(count) is int for count in noisy)


def test_decimal_epsilon_is_read_exactly() -> None:
    assert exact_epsilon(0.1) == Fraction(1, 10)
    assert exact_epsilon(Fraction(1, 3)) == Fraction(1, 3)
    assert exact_epsilon(np.float64(0.5)) == Fraction(1, 2)
    assert exact_epsilon(2) == 2


@pytest.mark.parametrize("epsilon", [0, -1, math.nan, math.inf, -math.inf])
def test_epsilon_that_is_not_positive_is_refused(epsilon: float) -> None:
    with pytest.raises(ConfigurationError, match="give a positive number"):
        noisy_counts([1], epsilon=epsilon, adjacency="replace", randomness=random.Random(0))


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="negative"):
        noisy_counts([3, -1], epsilon=1, adjacency="replace", randomness=random.Random(0))


def test_unknown_adjacency_is_refused_listing_the_valid_ones() -> None:
    with pytest.raises(ConfigurationError, match="choose one of: add-remove, replace"):
        sensitivity("remove")  # type: ignore[arg-type]  # the mistake under test
