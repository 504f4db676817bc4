import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from support.populations import (
    context,
    difficult_labels,
    labelled,
    outcome,
    population,
    rounds,
    select,
)

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Population, Selector
from potluck.server.selectors.fedentopt import FedEntOpt
from potluck.server.selectors.parts.label_entropy import Entropies, bits
from potluck.server.selectors.parts.parallel import passes

SIX = [[10, 0, 0], [0, 10, 0], [5, 5, 0], [0, 0, 4], [2, 2, 2], [0, 3, 7]]


def two_of_ten(clients: int = 100, seed: int = 0) -> Population:
    """Return clients of two labels each, i mod 10 and a random one, sharing 5000 samples a
    class."""
    generator = np.random.default_rng(seed)
    owns = np.zeros((clients, 10))
    for client in range(clients):
        owns[client, client % 10] = 1
        owns[client, (client + int(generator.integers(1, 10))) % 10] = 1
    counts = owns * (5000 // owns.sum(axis=0))
    return population(clients, classes=10, label_counts=counts)


def mean_entropy(federation: Population, buffer: int, number_of_rounds: int = 300) -> float:
    assert federation.label_counts is not None
    table = federation.label_counts
    chosen = rounds(FedEntOpt(buffer=buffer), federation, 10, number_of_rounds)
    return float(np.mean([bits(table[s.rows].sum(axis=0)) for s in chosen]))


def test_fedentopt_selects_as_in_the_worked_example() -> None:
    """From client 0, scores are .811 to 1.441 bits; clients 5 and 1 follow, H = 1.54101 bits."""
    table = np.array(SIX, dtype=np.float64)
    with passes(6) as run:
        scores = Entropies(table).with_each(table[0], run)[1:]
    assert scores.min() == pytest.approx(0.811, abs=5e-4)
    assert scores.max() == pytest.approx(1.441, abs=5e-4)
    found = [next(rounds(FedEntOpt(), labelled(SIX), 3, 1, seed=seed)) for seed in range(60)]
    from_zero = [selection for selection in found if selection.rows[0] == 0]
    assert from_zero
    for selection in from_zero:
        assert selection.rows.tolist() == [0, 5, 1]
        assert selection.reasons == ("drawn uniformly", "entropy +1.44 bit", "entropy +0.10 bit")
    assert bits(table[[0, 5, 1]].sum(axis=0)) == pytest.approx(1.54101, abs=5e-6)


def test_fedentopt_cohorts_of_two_label_clients_have_the_published_entropy() -> None:
    """With κ = 10 and Q = 70: 3.289 bits on average; ten uniformly drawn clients have 2.992."""
    assert mean_entropy(two_of_ten(), 70) >= 3.27


def test_fedentopt_without_a_buffer_never_selects_some_clients() -> None:
    times = np.zeros(100, dtype=np.int64)
    for selection in rounds(FedEntOpt(buffer=0), two_of_ten(), 10, 300):
        times[selection.rows] += 1
    assert (times == 0).any()


def test_large_buffer_makes_selection_counts_even() -> None:
    """With Q = 90, each client is picked 26 to 32 times in 300 rounds."""
    times = np.zeros(100, dtype=np.int64)
    for selection in rounds(FedEntOpt(buffer=90), two_of_ten(), 10, 300):
        times[selection.rows] += 1
    assert times.min() >= 26
    assert times.max() <= 32


def test_buffer_smaller_than_the_cohort_selects_no_client_twice_in_a_round() -> None:
    for selection in rounds(FedEntOpt(buffer=2), labelled(SIX), 6, 20):
        assert sorted(selection.rows.tolist()) == [0, 1, 2, 3, 4, 5]


def test_buffer_pauses_selected_clients_including_failed_ones() -> None:
    selector, federation = FedEntOpt(buffer=4), labelled(SIX)
    state = selector.init(federation)
    first = select(selector, state, context(federation, 2))
    ended = outcome(1, first)
    failed = type(ended)(
        round=1, selected=first.rows, included=first.rows[:0], seconds=ended.seconds
    )
    state = selector.observe(state, failed)
    assert state.arrays["buffer"].tolist() == first.rows.tolist()
    second = select(selector, state, context(federation, 2, number=2))
    assert not set(first.rows.tolist()) & set(second.rows.tolist())


def test_oldest_clients_of_the_buffer_are_selected_if_no_others_are_available() -> None:
    selector, federation = FedEntOpt(buffer=6), labelled(SIX)
    state = selector.init(federation)
    for number in (1, 2, 3):
        selection = select(selector, state, context(federation, 2, number=number))
        state = selector.observe(state, outcome(number, selection))
    oldest = state.arrays["buffer"].tolist()
    assert len(oldest) == 6
    selection = select(selector, state, context(federation, 2, number=4))
    assert selection.rows.tolist() == oldest[:2]
    assert selection.reasons[0] == "paused longest"
    available = np.sort(state.arrays["buffer"][2:])
    given = context(federation, 2, number=4, available=available)
    assert select(selector, state, given).rows.tolist() == oldest[2:4]


def test_the_default_buffer_is_half_of_the_clients() -> None:
    assert FedEntOpt().init(two_of_ten()).scalars["capacity"] == 50


def test_clients_without_label_counts_are_selected_only_first_or_last() -> None:
    counts = np.array([*SIX, [np.nan] * 3, [np.nan] * 3])
    firsts = set()
    for seed in range(60):
        federation = population(8, classes=3, label_counts=counts)
        rows = next(rounds(FedEntOpt(), federation, 7, 1, seed=seed)).rows
        firsts.add(int(rows[0]))
        assert not {6, 7} & set(rows[1:6].tolist())
    assert firsts == set(range(8))


def test_negative_noisy_label_counts_are_treated_as_zero() -> None:
    noisy = labelled([[5, -3], [0, 5], [-2, -9]])
    for seed in range(20):
        rows = next(rounds(FedEntOpt(), noisy, 2, 1, seed=seed)).rows.tolist()
        assert set(rows) == {0, 1} or 2 in rows[:1]


def test_fedentopt_breaks_ties_uniformly() -> None:
    federation = labelled([[8, 0], *[[0, 8]] * 4])
    seconds = [
        rows[1]
        for seed in range(1200)
        if (rows := next(rounds(FedEntOpt(), federation, 2, 1, seed=seed)).rows.tolist())[0] == 0
    ]
    shares = np.bincount(seconds, minlength=5)[1:] / len(seconds)
    np.testing.assert_allclose(shares, 0.25, atol=0.12)


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float64, (40, 5), elements=st.integers(0, 50).map(float)),
    hnp.arrays(np.float64, 5, elements=st.integers(0, 1000).map(float)),
)
def test_fedentopt_scores_equal_label_entropies(
    counts: NDArray[np.float64], base: NDArray[np.float64]
) -> None:
    with passes(40, block=16) as run:
        scores = Entropies(counts).with_each(base, run)
    np.testing.assert_allclose(scores, bits(base + counts), rtol=0, atol=1e-12)


def test_fedentopt_adds_the_client_of_highest_entropy_among_70000() -> None:
    """Enough clients for several threads; each pick is a largest entropy, computed again here."""
    generator = np.random.default_rng(3)
    counts = np.floor(
        generator.dirichlet([0.3] * 10, 70_000) * generator.integers(9, 400, (70_000, 1))
    )
    federation = population(70_000, classes=10, label_counts=counts)
    rows = next(rounds(FedEntOpt(), federation, 6, 1)).rows
    for chosen in range(1, 6):
        scores = bits(counts[rows[:chosen]].sum(axis=0) + counts)
        scores[rows[:chosen]] = -np.inf
        assert scores[rows[chosen]] >= scores.max() - 1e-12


@pytest.mark.parametrize("buffer", [-1, 2.5, True, "many"])
def test_invalid_fedentopt_buffer_is_refused(buffer: object) -> None:
    with pytest.raises(ConfigurationError, match="option 'buffer' is "):
        create(Selector, "fedentopt", {"buffer": buffer})


def plain_entropy(counts: Sequence[float]) -> float:
    """Return the entropy in bits; 0 if all counts are 0."""
    total = sum(counts)
    shares = [number / total for number in counts] if total > 0 else []
    return math.fsum(-share * math.log2(share) for share in shares if share > 0)


def enter(queue: list[int], row: int, capacity: int) -> None:
    """Put a row at the end of the queue, of which the last `capacity` rows remain."""
    if row in queue:
        queue.remove(row)
    queue.append(row)
    while len(queue) > capacity:
        queue.pop(0)


def plain_cohort(
    labels: Mapping[int, Sequence[float]],
    here: Sequence[int],
    size: int,
    queue: list[int],
    capacity: int,
    twin: np.random.Generator,
) -> list[tuple[int, str, float]]:
    """Choose clients, and let each enter the queue of pausing clients at once. Return, for each,
    its row, the kind of the choice, and by how much it raises the entropy in bits.

    labels: counts of the available clients that have samples; none is negative. The other clients
    can be the first one. They also complete the cohort, those that pause last."""
    cohort: list[tuple[int, str, float]] = []
    sums = [0.0] * 4
    while len(cohort) < size:
        left = [row for row in here if row not in [each[0] for each in cohort]]
        eligible = [row for row in left if row in labels] if cohort else left
        if not eligible:
            paused = [row for row in left if row in queue]
            for rows in ([row for row in left if row not in paused], paused):
                wanted = min(size - len(cohort), len(rows))
                for row in twin.choice(rows, wanted, replace=False).tolist() if wanted else []:
                    enter(queue, row, capacity)
                    cohort.append((row, "filled", 0.0))
            return cohort
        free = [row for row in eligible if row not in queue]
        open_rows = free or [next(row for row in queue if row in eligible)]
        if cohort:
            after = {
                row: plain_entropy([sum(pair) for pair in zip(sums, labels[row], strict=True)])
                for row in open_rows
            }
            best = [row for row in open_rows if after[row] >= max(after.values()) - 1e-12]
            row = best[int(twin.integers(len(best)))] if len(best) > 1 else best[0]
            kind = ("tied" if len(best) > 1 else "best") if free else "paused"
            gain = after[row] - plain_entropy(sums)
        else:
            row = int(twin.choice(open_rows, 1, replace=False)[0])
            kind, gain = ("first" if free else "first paused"), 0.0
        sums = [sum(pair) for pair in zip(sums, labels.get(row, [0.0] * 4), strict=True)]
        enter(queue, row, capacity)
        cohort.append((row, kind, gain))
    return cohort


UNIFORM = {
    "first": "drawn uniformly",
    "first paused": "paused longest",
    "filled": "no label counts; drawn uniformly",
}
"""Reason of each kind of choice that does not depend on entropy."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("buffer", [0, 2, None, 9, 40])
def test_rounds_agree_with_a_second_implementation(buffer: int | None, seed: int) -> None:
    """Few clients are available in every fourth round, some updates fail, and clients 12 to 14 join
    in round 8."""
    generator, selector = np.random.default_rng(seed), FedEntOpt(buffer=buffer)
    table = difficult_labels(generator)
    state, kinds = selector.init(labelled(table[:12].tolist())), Counter[str]()
    queue, capacity = list[int](), 6 if buffer is None else buffer
    for number in range(1, 61):
        federation = labelled(table[: 15 if number >= 8 else 12].tolist())
        share = 0.3 if number % 4 == 0 else 0.8
        here = np.flatnonzero(generator.random(len(federation)) < share)
        given_context = context(federation, 5, number=number, seed=seed, available=here)
        selection = select(selector, state, given_context)

        labels = {row: [max(0.0, value) for value in table[row].tolist()] for row in here.tolist()}
        labels = {row: counts for row, counts in labels.items() if row not in (3, 5, 12, 14)}
        paused, size = list(queue), min(5, len(here))
        twin = given_context.generator("fedentopt")
        cohort = plain_cohort(labels, here.tolist(), size, queue, capacity, twin)
        assert selection.rows.tolist() == [row for row, _, _ in cohort]
        for (row, kind, gain), reason in zip(cohort, selection.reasons, strict=True):
            kinds[kind] += 1
            kinds["left the buffer in this round"] += kind in ("best", "tied") and row in paused
            if kind in UNIFORM:
                assert reason == UNIFORM[kind]
            else:
                assert float(reason.split()[1]) == pytest.approx(gain, abs=0.00501)
        included = selection.rows[generator.random(size) < 0.6]
        state = selector.observe(state, replace(outcome(number, selection), included=included))
        assert state.arrays["buffer"].tolist() == queue
        assert state.scalars == {"capacity": capacity}
    assert min(kinds["best"], kinds["first"], kinds["filled"]) > 0
    assert kinds["tied"] > 0 or buffer == 40
    assert (kinds["paused"] > 0) == (capacity > 2)
    assert kinds["first paused"] > 0 or capacity < 9
    assert (kinds["left the buffer in this round"] > 0) == (0 < capacity < 40)
