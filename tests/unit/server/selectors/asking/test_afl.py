"""AFL's probabilities, on small federations."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from support.populations import context, outcome, played, population

from potluck.server.selection import Answers, Ask, Floats, Rows
from potluck.server.selectors.asking.afl import Afl
from potluck.server.state import State


def cohorts(
    selector: Afl, losses: list[float], count: int, draws: int, samples: Rows | None = None
) -> Floats:
    """Return how often each client was selected, in `draws` rounds from the same state."""
    federation, state = population(len(losses)), State(arrays={"loss": np.array(losses)})
    if samples is not None:
        federation = replace(federation, samples=samples)
    found = np.zeros(len(losses))
    for number in range(1, draws + 1):
        selection, _ = played(selector, state, context(federation, count, number=number))
        found[selection.rows] += 1
    return found / draws


def test_the_lowest_valuations_are_never_drawn_without_a_uniform_share() -> None:
    selector = Afl(alpha1=0.5, alpha3=0.0)
    found = cohorts(selector, [1.0, 2.0, 3.0, 4.0], 1, 50)
    assert found[:2].tolist() == [0, 0]
    assert found[2:].sum() == 1


def test_probabilities_are_a_softmax_of_valuations() -> None:
    """The valuation is v = √n · loss, with n samples in the client's profile; alpha2 scales it."""
    losses = [0.5, 1.0, 1.5]
    samples = np.array([1, 4, 4])
    weights = np.exp(0.5 * np.sqrt(samples) * losses)
    selector = Afl(alpha1=0.0, alpha2=0.5, alpha3=0.0)
    found = cohorts(selector, losses, 1, 3000, samples)
    assert found == pytest.approx(weights / weights.sum(), abs=0.03)


def test_a_share_of_the_cohort_is_uniform() -> None:
    found = cohorts(Afl(alpha1=0.75, alpha3=1.0), [1.0, 2.0, 3.0, 4.0], 1, 2000)
    assert found == pytest.approx([0.25] * 4, abs=0.04)
    both = cohorts(Afl(alpha1=0.75, alpha3=0.5), [1.0, 2.0, 3.0, 4.0], 2, 300)
    assert both[3] == 1, "the one client that is left always is in the weighted half"


def test_shares_of_a_whole_number_of_clients_are_not_rounded_down_by_one() -> None:
    """In floating point, (1 − 0.8) · 5 is slightly below 1, and 0.29 · 100 slightly below 29."""
    weighted = cohorts(Afl(alpha1=0.9, alpha3=0.8), [1.0] * 9 + [2.0], 5, 40)
    assert weighted[9] == 1, "one place of five is the weighted draw's"
    rising = [float(row) for row in range(100)]
    found = cohorts(Afl(alpha1=0.29, alpha2=0.0, alpha3=0.0), rising, 71, 1)
    assert found.tolist() == [0.0] * 29 + [1.0] * 71


def test_the_cohort_is_asked_before_it_trains_and_new_clients_count_most() -> None:
    federation, selector = population(3), Afl(alpha1=0.67, alpha3=0.0)
    state, asked = selector.init(federation), []

    def answer(ask: Ask) -> Answers:
        asked.append(ask.rows.tolist())
        return Answers(rows=ask.rows, values={"loss": np.full(len(ask.rows), 2.0)})

    seen: set[int] = set()
    for number in (1, 2, 3):
        selection, answers = played(selector, state, context(federation, 1, number=number), answer)
        assert asked[-1] == selection.rows.tolist()
        seen |= set(selection.rows.tolist())
        state = selector.observe(state, outcome(number, selection, answers))
        assert np.count_nonzero(state.arrays["loss"] == 2.0) == len(seen)


def test_a_hundred_thousand_clients_take_seconds() -> None:
    clients = 100_000
    state = State(arrays={"loss": np.random.default_rng(1).uniform(0, 5, clients)})
    started = time.process_time()
    selection, _ = played(Afl(), state, context(population(clients), 1000))
    assert len(selection.rows) == 1000
    assert time.process_time() - started < 20
