"""OSMD against the authors' arithmetic, its projection against a search, its draws against
frequencies."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.populations import context, facts_of, population, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Floats, RoundOutcome, Rows, Selector
from potluck.server.selectors.parts.inclusion import least_variance
from potluck.server.selectors.updates.osmd import Osmd, experts, projected, rates
from potluck.server.state import State


def ended(
    rows: Rows,
    norms: Floats,
    selected: Rows | None = None,
    samples: Sequence[int] | NDArray[np.int64] = (),
) -> RoundOutcome:
    chosen = rows if selected is None else selected
    found = replace(facts_of(np.ones((len(rows), 2)), rows=rows), norms=norms)
    return RoundOutcome(
        round=1,
        selected=chosen,
        included=rows,
        seconds=np.ones(len(chosen)),
        samples=np.array(samples, dtype=np.int64),
        facts=found,
    )


class AuthorsSampler:
    """Sampler as in the authors' program: probabilities have sum 1, and values are sorted to find
    those at the minimum. The unit of a is such that M² ā = 1."""

    def __init__(self, clients: int, alpha: float) -> None:
        self.clients, self.alpha = clients, alpha
        self.phase, self.done = 0, 0
        self.mixed = [1 / clients] * clients
        self.begin()

    def begin(self) -> None:
        self.phase, self.done = self.phase + 1, 0
        self.rounds, size = 2 ** (self.phase - 1), math.log(self.clients)
        inner = (size + 4 * (self.rounds - 1) * math.log(self.clients / self.alpha)) / size
        number = math.ceil(0.5 * math.log2(inner)) + 1
        self.trust = [(1 + 1 / number) / (e * (e + 1)) for e in range(1, number + 1)]
        self.probabilities = [list(self.mixed) for _ in range(number)]

    def step(self, before: list[float], gradient: dict[int, float], rate: float) -> list[float]:
        moved = list(before)
        for client, slope in gradient.items():
            moved[client] *= math.exp(-rate * slope)
        ascending, least = sorted(moved), self.alpha / self.clients
        at_least = 0
        for m in range(self.clients, 0, -1):
            if ascending[m - 1] * (1 - least * (m - 1)) <= least * sum(ascending[m - 1 :]):
                at_least = m
                break
        rest = sum(ascending[at_least:])
        border = ascending[at_least - 1] if at_least else -1.0
        return [
            least if value <= border else value * (1 - least * at_least) / rest for value in moved
        ]

    def learn(self, values: dict[int, float], drawn: dict[int, float], count: int) -> None:
        """Learn from a of the clients whose updates arrived, and their chance of a single draw."""
        bar, size = 1 / self.clients**2, self.clients
        gamma = self.alpha / size * math.sqrt(8 * count / (self.rounds * bar))
        losses = []
        for e, before in enumerate(self.probabilities):
            first = count**2 * self.alpha**3 / (size**3 * bar)
            rate = 2**e * first * math.sqrt(math.log(size) / (2 * self.rounds))
            losses.append(sum(a / (count**2 * before[m] * drawn[m]) for m, a in values.items()))
            slopes = {m: -a / (count**2 * before[m] ** 2 * drawn[m]) for m, a in values.items()}
            self.probabilities[e] = self.step(before, slopes, rate)
        trust = [t * math.exp(-gamma * loss) for t, loss in zip(self.trust, losses, strict=True)]
        self.trust = [t / sum(trust) for t in trust]
        self.mixed = [
            sum(t * p[m] for t, p in zip(self.trust, self.probabilities, strict=True))
            for m in range(size)
        ]
        self.done += 1


@pytest.mark.parametrize("alpha", [0.1, 0.4, 1.0])
@pytest.mark.parametrize("clients", [2, 9])
def test_probabilities_are_those_of_the_authors_program(clients: int, alpha: float) -> None:
    generator = np.random.default_rng(clients)
    federation = replace(population(clients), samples=generator.integers(5, 50, clients))
    selector, theirs = Osmd(floor=alpha), AuthorsSampler(clients, alpha)
    state = selector.init(federation)
    shares, longest = federation.samples / federation.samples.mean(), 0.0
    for number in range(1, 36):
        count = int(generator.integers(1, clients + 1))
        rows = generator.permutation(clients)[:count]
        arrived = rows[: max(1, count - number % 3)]
        norms = generator.uniform(0.5, 2, len(arrived)) * (1 + arrived)
        squares = np.square(shares[arrived] * norms)
        longest = longest or float(squares.max())
        values = dict(zip(arrived.tolist(), (squares / longest / clients**2).tolist(), strict=True))
        included = least_variance(np.array(theirs.mixed), count).tolist()
        theirs.learn(values, {m: included[m] / count for m in values}, count)
        state = selector.observe(state, ended(arrived, norms, rows, federation.samples))
        if theirs.done == theirs.rounds:
            theirs.begin()
            longest = float(squares.max())
        assert state.arrays["trust"] == pytest.approx(theirs.trust)
        assert state.arrays["chances"] / clients == pytest.approx(np.array(theirs.probabilities))
    assert state.scalars["phase"] == 6
    assert state.scalars["left"] == 28


def plain_inclusion(chances: Mapping[int, float], count: int) -> dict[int, float]:
    """Return probabilities ∝ chance with sum `count`; clients above 1 are certain."""
    found, free, places = dict[int, float](), dict(chances), count
    while free:
        shares = {row: places * chance / sum(free.values()) for row, chance in free.items()}
        certain = [row for row in free if shares[row] > 1]
        if not certain:
            return found | shares
        found |= dict.fromkeys(certain, 1.0)
        free = {row: chance for row, chance in free.items() if row not in certain}
        places -= len(certain)
    return found


def plain_draw(chances: Mapping[int, float], place: float) -> list[int]:
    """Return the clients at `place`, `place` + 1, …, on a line of segments as long as chances."""
    drawn, end = [], 0.0
    for row, chance in chances.items():
        end += chance
        if end > place:
            drawn.append(row)
            place += 1
    return drawn


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("alpha", "weights"), [(0.4, "inverse"), (0.1, "inverse"), (0.2, "samples")]
)
def test_rounds_agree_with_a_second_implementation(alpha: float, weights: str, seed: int) -> None:
    """Some clients are unavailable, some updates fail, and updates of later clients are longer."""
    generator, size = np.random.default_rng(seed), 7
    federation = replace(population(size), samples=generator.integers(5, 50, size))
    selector = create(Selector, "osmd", {"floor": alpha, "weights": weights})
    theirs, state, longest = AuthorsSampler(size, alpha), selector.init(federation), 0.0
    shares = (federation.samples / federation.samples.mean()).tolist()
    for number in range(1, 41):
        here = np.flatnonzero(generator.random(size) < 0.8)
        given_context = context(federation, 3, number=number, seed=seed, available=here)
        selection, twin = select(selector, state, given_context), given_context.generator("osmd")
        order, count = twin.permutation(here).tolist(), min(3, len(here))
        included = plain_inclusion({row: theirs.mixed[row] for row in order}, count)
        included = {row: included[row] for row in order}
        picks = plain_draw(included, float(twin.random()))
        assert selection.rows.tolist() == picks
        expected = [shares[row] / included[row] for row in picks]
        assert selection.weights == (None if weights == "samples" else pytest.approx(expected))

        arrived = selection.rows[generator.random(count) < 0.7]
        norms = (1 + arrived) * generator.lognormal(sigma=0.5, size=len(arrived))
        state = selector.observe(state, ended(arrived, norms, selection.rows, federation.samples))
        if not len(arrived):
            continue
        lengths = dict(zip(arrived.tolist(), norms.tolist(), strict=True))
        squares = {row: (shares[row] * length) ** 2 for row, length in lengths.items()}
        longest = longest or max(squares.values())
        values = {row: a / longest / size**2 for row, a in squares.items()}
        everyone = plain_inclusion(dict(enumerate(theirs.mixed)), count)
        theirs.learn(values, {row: everyone[row] / count for row in values}, count)
        if theirs.done == theirs.rounds:
            theirs.begin()
            longest = max(squares.values())
        assert state.arrays["trust"] == pytest.approx(theirs.trust)
        assert state.arrays["chances"] / size == pytest.approx(np.array(theirs.probabilities))
    assert theirs.phase >= 5


def test_a_round_by_hand() -> None:
    """Two of four clients, each with π = 1/2, have updates of lengths 3 and 4; α is 0.4. The first
    rate is .4³ √(log 4 / 2), and the shares of ā are 9/16 and 1."""
    federation, selector = population(4), Osmd()
    state = selector.observe(
        selector.init(federation), ended(np.array([1, 3]), np.array([3.0, 4.0]))
    )
    rate = 0.064 * math.sqrt(math.log(4) / 2)
    values = np.array([1, math.exp(rate * 9 / 16), 1, math.exp(rate)])
    assert rate == pytest.approx(0.05328, abs=1e-5)
    assert state.scalars == {"phase": 2, "left": 2, "longest": 16.0}
    assert state.arrays["chances"] == pytest.approx(np.tile(4 * values / values.sum(), (3, 1)))
    assert state.arrays["trust"] == pytest.approx([2 / 3, 2 / 9, 1 / 9])


def test_experts_and_rates_by_hand() -> None:
    assert [experts(rounds, 100, 0.4) for rounds in (1, 2, 512, 1000)] == [1, 3, 7, 8]
    assert rates(2, 1000, 100, 0.4) == pytest.approx([0.0030710, 0.0061420], abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(0, 1e3), min_size=1, max_size=12).filter(
        lambda drawn: max(drawn) >= 1
    ),
    floor=st.floats(0.01, 1),
)
def test_the_projection_agrees_with_a_search(values: list[float], floor: float) -> None:
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if sum(max(floor, middle * value) for value in values) < len(values):
            low = middle
        else:
            high = middle
    found = projected(np.array(values), floor)
    assert found == pytest.approx([max(floor, high * value) for value in values], rel=1e-6)
    assert found.min() >= floor
    assert found.mean() == pytest.approx(1)


def learned() -> State:
    """Return the state after 127 rounds of cohorts of 2 of 6, in which client 0 has an update of
    length 8, the others of length 1."""
    federation, selector = population(6), Osmd()
    state = selector.init(federation)
    for number in range(1, 128):
        rows = select(selector, state, context(federation, 2, number=number)).rows
        state = selector.observe(state, ended(rows, np.where(rows == 0, 8.0, 1.0)))
    return state


def test_long_updates_are_drawn_more_often_and_weighted_less() -> None:
    federation, selector, state = population(6), Osmd(), learned()
    often, weights = np.zeros(6), np.zeros(6)
    for number in range(1, 1001):
        selection = select(selector, state, context(federation, 2, number=number))
        often[selection.rows] += 1
        assert selection.weights is not None
        weights[selection.rows] += selection.weights
    assert often[0] > 2 * often[1:].max()
    assert weights / 1000 == pytest.approx(np.ones(6), abs=0.15), "unbiased"


def test_probabilities_follow_lengths_that_change() -> None:
    federation, selector, state = population(6), Osmd(), learned()
    before = state.arrays["chances"][0]
    for number in range(128, 256):
        rows = select(selector, state, context(federation, 2, number=number)).rows
        state = selector.observe(state, ended(rows, np.where(rows == 5, 8.0, 1.0)))
    after = state.arrays["chances"][0]
    assert after[0] < 0.8 * before[0]
    assert after[5] > 2 * before[5]


def test_the_unit_of_lengths_does_not_matter() -> None:
    federation, selector = population(5), Osmd()
    states = [selector.init(federation) for _ in range(2)]
    for number in range(1, 10):
        norms = np.random.default_rng(number).uniform(1, 9, 3)
        rows = np.array([0, number % 4 + 1, (number + 1) % 4 + 1])
        states = [
            selector.observe(state, ended(rows, unit * norms))
            for state, unit in zip(states, (1.0, 1e-6), strict=True)
        ]
    first, second = (state.arrays["chances"] for state in states)
    assert second == pytest.approx(first)


def test_all_clients_together_are_weighted_by_their_samples() -> None:
    federation = replace(population(2), samples=np.array([30, 10]))
    both = select(Osmd(), Osmd().init(federation), context(federation, 2))
    assert both.weights is not None
    found = dict(zip(both.rows.tolist(), both.weights.tolist(), strict=True))
    assert found == pytest.approx({0: 1.5, 1: 0.5})
    assert select(Osmd(weights="samples"), learned(), context(population(6), 2)).weights is None


@pytest.mark.parametrize("norm", [0.0, np.nan, np.inf])
def test_updates_without_a_length_start_no_phase(norm: float) -> None:
    federation, selector = population(3), Osmd()
    state = selector.init(federation)
    after = selector.observe(state, ended(np.array([0, 2]), np.full(2, norm)))
    assert after.scalars == state.scalars


def test_one_extreme_update_leaves_all_clients_their_minimum() -> None:
    federation, selector = population(6), Osmd()
    state = selector.observe(selector.init(federation), ended(np.array([0, 1]), np.full(2, 1e-3)))
    state = selector.observe(state, ended(np.array([2, 3]), np.full(2, 1e9)))
    assert np.isfinite(state.arrays["chances"]).all()
    assert state.arrays["chances"].min() == pytest.approx(0.4)
    assert state.arrays["chances"].mean(axis=1) == pytest.approx(np.ones(3))


def test_a_hundred_thousand_clients_take_seconds() -> None:
    federation, selector = population(100_000), Osmd()
    values = np.random.default_rng(1).uniform(0.4, 1.6, (7, 100_000))
    state = State(
        scalars={"phase": 10, "left": 9, "longest": 1.0},
        arrays={"chances": values, "trust": np.full(7, 1 / 7)},
    )
    started = time.perf_counter()
    rows = select(selector, state, context(federation, 1000)).rows
    selector.observe(state, ended(rows, np.ones(1000)))
    assert len(rows) == 1000
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize("options", [{"floor": 0}, {"floor": 1.5}, {"weights": "equal"}])
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Selector, "osmd", options)
