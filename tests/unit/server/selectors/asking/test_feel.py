from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import ArrayLike
from support.populations import Respond, context, outcome, played, population, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Answers, Ask, Floats, Population, Selector
from potluck.server.selectors.asking.feel import Feel, probabilities


def federation(samples: ArrayLike) -> Population:
    numbers = np.array(samples, dtype=np.int64)
    return replace(population(len(numbers)), samples=numbers)


def answering(norms: ArrayLike, seconds: ArrayLike) -> Respond:
    told = {"gradient-norm": np.array(norms, float), "seconds": np.array(seconds, float)}

    def respond(ask: Ask) -> Answers:
        assert ask.kind == "gradient-norm"
        return Answers(rows=ask.rows, values={name: told[name][ask.rows] for name in ask.names})

    return respond


def test_feel_probabilities_equal_the_worked_example() -> None:
    """A worked example: λ = 0; with ρ = 1 durations do not matter."""
    shares, norms = np.array([0.25, 0.25, 0.5]), np.array([1.0, 2, 1])
    seconds = np.array([1.0, 4, 1])
    assert probabilities(shares * norms, seconds, 0.5) == pytest.approx([0.25, 0.25, 0.5])
    assert probabilities(shares * norms, seconds, 1.0) == pytest.approx([0.2, 0.4, 0.4])


def reference(importance: Floats, seconds: Floats, rho: float) -> Floats:
    """Return the probabilities by the formula as printed, with λ found by bisection."""

    def at(value: float) -> Floats:
        return importance * np.sqrt(rho / ((1 - rho) * seconds + value))

    low = -(1 - rho) * float(seconds.min())
    high = low + 1.0
    while at(high).sum() > 1:
        high += high - low
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).sum() > 1 else (low, middle)
    return at(high)


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.99])
def test_feel_probabilities_equal_those_found_by_bisection(rho: float) -> None:
    generator = np.random.default_rng(3)
    for _ in range(20):
        importance, seconds = generator.uniform(0.1, 2, 9), generator.uniform(1, 30, 9)
        expected = reference(importance, seconds, rho)
        assert probabilities(importance, seconds, rho) == pytest.approx(expected, rel=1e-6)


def test_feel_probabilities_sum_to_1_for_extreme_importances() -> None:
    weights = ([1e-300, 1.0, 2.0], [5e-324, 1e-320, 0.0], [1e9, 1.0, 1e-200], [0.0, 0.0, 0.0])
    durations = ([1e-6, 1e9, 1.0], [1e9, 1.0, 1.0], [1.0, 1.0 + 1e-16, 1e-6])
    for weight in weights:
        for duration in durations:
            for rho in (5e-324, 1e-6, 0.5, 0.999999, 1.0):
                found = probabilities(np.array(weight), np.array(duration), rho)
                assert found.sum() == pytest.approx(1)
                assert (found >= 0).all()


def test_first_client_of_a_feel_cohort_is_drawn_with_the_computed_probabilities() -> None:
    """On a virtual clock, before any training: 3000 draws, within four standard deviations."""
    given, told = federation([100, 100, 200]), answering([1, 2, 1], [1, 4, 1])
    selector = Feel()
    state = selector.init(given)
    drawn = Counter(
        int(select(selector, state, context(given, 1, seed=seed), told).rows[0])
        for seed in range(3000)
    )
    for row, share in enumerate([0.25, 0.25, 0.5]):
        assert drawn[row] == pytest.approx(
            3000 * share, abs=4 * (3000 * share * (1 - share)) ** 0.5
        )


def test_feel_uses_the_duration_of_the_last_training() -> None:
    """A simulated duration counts until the client has trained; a failure counts as the
    deadline."""
    given, told = population(3), answering([1, 1, 1], [2, 3, 0])
    selector = Feel()
    selection, answers = played(selector, selector.init(given), context(given, 3), told)
    ended = replace(
        outcome(1, selection, answers),
        selected=np.array([0, 1]),
        cohort=np.array([0, 1]),
        included=np.array([0]),
        seconds=np.array([5.0, np.nan]),
        deadline_seconds=60.0,
    )
    state = selector.observe(selector.init(given), ended)
    assert state.arrays["seconds"].tolist()[:2] == [5.0, 60.0]
    assert np.isnan(state.arrays["seconds"][2])
    later, _ = played(selector, state, context(given, 3, number=2), told)
    [reason] = [r for row, r in zip(later.rows, later.reasons, strict=True) if row == 0]
    assert reason.startswith("gradient 1, 5 s: probability 0.")


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -1.0])
def test_feel_selects_clients_without_a_gradient_norm_last(nonsense: float) -> None:
    given, told = population(4), answering([nonsense, 0.0, 3, nonsense], [1, 1, 1, 1])
    for seed in range(10):
        chosen = select(Feel(), Feel().init(given), context(given, 3, seed=seed), told)
        assert chosen.rows[:2].tolist() == [2, 1]
        assert "gave no gradient norm" in chosen.reasons[2]


@pytest.mark.parametrize("rho", [0, -0.5, 1.5, "half"])
def test_feel_option_out_of_range_is_refused(rho: object) -> None:
    with pytest.raises(ConfigurationError, match="'rho'"):
        create(Selector, "feel", {"rho": rho})


def test_feel_draws_with_replacement_give_an_unbiased_mean() -> None:
    """The mean over rounds of the weighted values is that of all clients by samples."""
    clients, draws = federation([100, 100, 200, 50]), 3
    values = np.array([1.0, -4.0, 2.0, 10.0])
    answers = answering([1.0, 5.0, 0.3, 2.0], [1.0, 9.0, 2.0, 0.5])
    sums, sizes = [], set[int]()
    feel = Feel(unbiased=True)
    assert feel.sets_weights
    assert not Feel().sets_weights
    state = feel.init(clients)
    for number in range(1, 3001):
        selection = select(feel, state, context(clients, draws, number=number), answers)
        assert selection.weights is not None
        sums.append(float((selection.weights * values[selection.rows]).sum()))
        sizes.add(len(selection.rows))
    expected = float((clients.samples / clients.samples.sum() * values).sum())
    deviation = np.std(sums) / np.sqrt(len(sums))
    assert abs(np.mean(sums) - expected) < 4 * deviation
    assert sizes == {1, 2, 3}


def test_feel_draws_with_replacement_are_uniform_without_any_answers_but_samples_count() -> None:
    clients = federation([100, 200, 300])
    none = answering([np.nan] * 3, [np.nan] * 3)
    feel = Feel(unbiased=True)
    selection = select(feel, feel.init(clients), context(clients, 200), none)
    assert selection.weights is not None
    assert selection.rows.tolist() == [0, 1, 2]
    said = [reason.split() for reason in selection.reasons]  # drawn 66 times of 200 with …
    drawn = np.array([int(words[1]) / int(words[4]) for words in said])
    assert selection.weights == pytest.approx(drawn * np.array([100, 200, 300]) / 600 * 3)
    assert "with probability 0.333" in selection.reasons[0]
