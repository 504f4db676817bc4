"""FedCS against a second implementation of Alg. 3."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.populations import context, population

from potluck.server.selection import RoundOutcome, Selection, SelectionContext
from potluck.server.selectors.fedcs import FedCS, greedy
from potluck.server.state import State


def select(selector: FedCS, state: State, given_context: SelectionContext) -> Selection:
    return selector.select(state, given_context)


def algorithm_3(training: list[float], uploads: list[float], deadline: float) -> list[int]:
    """Return the chosen clients; as in the paper, clients are tried even after a late one."""
    left, chosen, elapsed = set(range(len(training))), [], 0.0
    while left:
        prolonged = {k: uploads[k] + max(0.0, training[k] - elapsed) for k in left}
        best = min(left, key=lambda k: (prolonged[k], k))
        left.remove(best)
        if elapsed + prolonged[best] < deadline:
            elapsed += prolonged[best]
            chosen.append(best)
    return chosen


def test_greedy_by_hand() -> None:
    """The elapsed time Θ is 1 + 1 = 2, then max(0, 4 − 2) + 1 = 3 more, then an upload of 4."""
    order, ends = greedy(np.array([4.0, 1.0, 3.0]), np.array([1.0, 1.0, 4.0]), 100.0, 3)
    assert order.tolist() == [1, 0, 2]
    assert ends.tolist() == [2.0, 5.0, 9.0]
    assert greedy(np.array([4.0, 1.0, 3.0]), np.array([1.0, 1.0, 4.0]), 9.0, 3)[0].tolist() == [
        1,
        0,
    ]


@settings(max_examples=60, deadline=None)
@given(
    clients=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=12),
    deadline=st.integers(1, 60),
)
def test_greedy_agrees_with_algorithm_3(clients: list[tuple[int, int]], deadline: int) -> None:
    training = [float(t) for t, _ in clients]
    uploads = [float(u) for _, u in clients]
    order, ends = greedy(np.array(training), np.array(uploads), float(deadline), len(clients))
    assert order.tolist() == algorithm_3(training, uploads, float(deadline))
    assert (np.diff(ends) >= 0).all()
    assert not len(ends) or ends[-1] < deadline


def test_the_cohort_ends_at_the_deadline_only_if_asked() -> None:
    federation = population(6)
    state = State(arrays={"seconds": np.array([10.0, 20.0, 30.0, 40.0, 50.0, 60.0])})
    filling = FedCS(deadline_seconds=35.0, upload_share=0.0, candidates=1.0)
    early = select(replace(filling, stop_early=True), state, context(federation, 5))
    assert early.rows.tolist() == [0, 1, 2]
    assert early.reasons[-1] == "done after 30 s"
    whole = select(filling, state, context(federation, 5))
    assert whole.rows.tolist() == [0, 1, 2, 3, 4]
    assert whole.reasons[-1] == "takes 50 s, beyond the deadline"


def plain_cohort(
    seconds: Mapping[int, float],
    here: Sequence[int],
    selector: FedCS,
    count: int,
    twin: np.random.Generator,
) -> list[int]:
    """Return a cohort. seconds: last duration of each client that has one."""
    size = min(count, len(here))
    drawn = twin.permutation(np.array(here)).tolist()
    drawn = drawn[: max(math.ceil(selector.candidates * len(here)), 2 * size)]
    chosen = [row for row in drawn if row not in seconds][:size]
    known = [row for row in drawn if row in seconds]
    uploads = [selector.upload_share * seconds[row] for row in known]
    training = [seconds[row] - upload for row, upload in zip(known, uploads, strict=True)]
    fitting = [known[k] for k in algorithm_3(training, uploads, selector.deadline_seconds)]
    chosen += fitting[: size - len(chosen)]
    if not selector.stop_early or not chosen:
        rest = sorted((row for row in known if row not in chosen), key=lambda row: seconds[row])
        chosen += rest[: size - len(chosen)]
    return chosen


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stop_early", [False, True])
@pytest.mark.parametrize(("candidates", "deadline"), [(0.1, 60.0), (0.5, 60.0), (1.0, 4.0)])
def test_rounds_agree_with_a_second_implementation(
    candidates: float, deadline: float, stop_early: bool, seed: int
) -> None:
    """Some clients are unavailable; some fail, in rounds with and without a deadline; clients 25 to
    29 join in round 5. No client can finish within 4 seconds."""
    generator = np.random.default_rng(seed)
    selector = FedCS(deadline_seconds=deadline, candidates=candidates, stop_early=stop_early)
    state, seconds, sizes = selector.init(population(25)), dict[int, float](), set[int]()
    for number in range(1, 16):
        clients = 30 if number >= 5 else 25
        here = np.flatnonzero(generator.random(clients) < 0.8)
        given_context = context(population(clients), 5, number=number, seed=seed, available=here)
        rows = select(selector, state, given_context).rows
        twin = given_context.generator("fedcs")
        assert rows.tolist() == plain_cohort(seconds, here.tolist(), selector, 5, twin)
        sizes.add(len(rows))

        told = generator.uniform(5, 90, len(rows))
        failed = generator.random(len(rows)) < 0.3
        limit = float(generator.choice([np.inf, 70.0]))
        outcome = RoundOutcome(
            round=number,
            selected=rows,
            included=rows[~failed],
            seconds=np.where(failed, np.nan, told),
            deadline_seconds=limit,
        )
        state = selector.observe(state, outcome)
        for row, duration, late in zip(rows.tolist(), told.tolist(), failed, strict=True):
            if not late:
                seconds[row] = duration
            elif np.isfinite(limit):
                seconds[row] = limit
            elif row not in seconds:
                seconds[row] = deadline
    if deadline == 60.0:
        assert (min(sizes) < 5) == stop_early


@pytest.mark.parametrize("deadline", [np.inf, 25.0])
def test_a_failed_client_does_not_go_first_again(deadline: float) -> None:
    federation, selector = population(4), FedCS(candidates=1.0)
    outcome = RoundOutcome(
        round=1,
        selected=np.arange(4),
        included=np.arange(3),
        seconds=np.array([9.0, 8.0, 7.0, np.nan]),
        deadline_seconds=deadline,
    )
    state = selector.observe(selector.init(federation), outcome)
    assert select(selector, state, context(federation, 3)).rows.tolist() == [2, 1, 0]


def test_a_hundred_thousand_clients_take_seconds() -> None:
    clients = 100_000
    state = State(arrays={"seconds": np.random.default_rng(1).uniform(1, 100, clients)})
    started = time.process_time()
    found = select(FedCS(candidates=1.0), state, context(population(clients), 200))
    assert len(found.rows) == 200
    assert time.process_time() - started < 20


def test_a_client_a_hundred_times_slower_than_the_median_misses_the_deadline() -> None:
    federation = population(6)
    state = State(arrays={"seconds": np.array([5.0, 5.0, 1000.0, 5.0, 5.0, 5.0])})
    selector = FedCS(deadline_seconds=180.0, candidates=1.0, stop_early=True)
    assert 2 not in select(selector, state, context(federation, 6)).rows
    filled = select(replace(selector, stop_early=False), state, context(federation, 6))
    assert filled.reasons[-1] == "takes 1000 s, beyond the deadline"
