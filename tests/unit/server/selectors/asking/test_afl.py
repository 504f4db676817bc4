"""AFL's probabilities, on small federations, and its rounds against a second implementation."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.plain_loops import limited
from support.populations import context, outcome, played, population

from potluck.server.selection import Answers, Ask, Floats, Rows, Selection
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


def test_a_cohort_of_one_is_mostly_drawn_by_valuations() -> None:
    found = cohorts(Afl(alpha1=0.75, alpha3=0.2), [1.0, 2.0, 3.0, 4.0], 1, 2000)
    assert found == pytest.approx([0.05, 0.05, 0.05, 0.85], abs=0.03)


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


def plain_valuations(losses: Mapping[int, float], samples: Mapping[int, int]) -> dict[int, float]:
    """Return the valuations of the available clients.

    losses: last loss of each client that ever reported one. samples: of the available clients, 0 if
    unknown."""
    told = [number for number in samples.values() if number > 0]
    usual = sum(told) / len(told) if told else 1.0
    sizes = {row: number if number > 0 else usual for row, number in samples.items()}
    known = limited(losses, 100)
    found = {row: math.sqrt(size) * known[row] for row, size in sizes.items() if row in known}
    return {row: found.get(row, max(found.values(), default=0.0)) for row in samples}


def plain_cohort(
    valuations: Mapping[int, float],
    size: int,
    alphas: tuple[float, float, float],
    twin: np.random.Generator,
) -> tuple[list[int], list[int]]:
    """Return the clients drawn by their valuations, and those drawn uniformly, by Alg. 1."""
    share, factor, uniform = alphas
    places = twin.random(len(valuations)).tolist()
    order = sorted(zip([-value for value in valuations.values()], places, valuations, strict=True))
    kept = [row for _, _, row in order][: len(order) - math.floor(share * len(order) + 1e-9)]
    weighted_places = math.floor((1 - uniform) * size + twin.random())
    first, second = twin.exponential(size=(2, len(kept))).tolist()
    waits = {}
    for place, row in enumerate(kept):  # the first of exponential waiting times, by rates
        rate = math.exp(factor * (valuations[row] - valuations[kept[0]]))
        waits[row] = (first[place] / rate if rate else math.inf, second[place])
    weighted = sorted(kept, key=lambda row: waits[row])
    weighted = weighted[:weighted_places]
    others = [row for row in valuations if row not in weighted]
    return weighted, twin.choice(others, size - len(weighted), replace=False).tolist()


def test_negative_or_infinite_answers_keep_the_last_loss() -> None:
    state = State(arrays={"loss": np.array([0.1, 1.0, 2.0, 3.0])})
    selection = Selection(rows=np.arange(3), reasons=("drawn",) * 3)
    answers = Answers(rows=np.arange(3), values={"loss": np.array([-1.0, np.inf, 0.5])})
    found = Afl().observe(state, outcome(1, selection, [answers]))
    assert found.arrays["loss"].tolist() == [0.1, 1.0, 0.5, 3.0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "alphas", [(0.75, 0.01, 0.1), (0.5, 1.0, 0.25), (0.0, 0.0, 0.0), (0.2, 40.0, 0.5), (1, 1, 0)]
)
def test_rounds_agree_with_a_second_implementation(
    alphas: tuple[float, float, float], seed: int
) -> None:
    """Many valuations are equal, some losses are far above the others, some answers are missing,
    and those of client 3 are invalid. Clients 9 to 12 join in round 5."""
    generator, (alpha1, alpha2, alpha3) = np.random.default_rng(seed), alphas
    selector = Afl(alpha1=alpha1, alpha2=alpha2, alpha3=alpha3)
    samples, asked = generator.choice([0, 1, 4, 4, 9], 13), list[Sequence[int]]()
    state, losses = selector.init(population(9)), dict[int, float]()

    def answer(ask: Ask) -> Answers:
        asked.append(ask.rows.tolist())
        rows = ask.rows[generator.random(len(ask.rows)) < 0.8]
        values = generator.choice([0, 0.5, 1, 1, 2, 3, 1e4], len(rows))
        values[rows == 3] = -1
        return Answers(rows=rows, values={"loss": values})

    for number in range(1, 15):
        clients = 13 if number >= 5 else 9
        federation = replace(population(clients), samples=samples[:clients])
        here = np.flatnonzero(generator.random(clients) < 0.8)
        given = context(federation, 5, number=number, seed=seed, available=here)
        selection, answers = played(selector, state, given, answer)
        numbers = dict(zip(here.tolist(), samples[here].tolist(), strict=True))
        valuations = plain_valuations(losses, numbers)
        size = min(5, len(here))
        weighted, uniform = plain_cohort(valuations, size, alphas, given.generator("afl"))
        assert selection.rows.tolist() == weighted + uniform
        assert asked[-1] == sorted(weighted + uniform)
        reported = [float(reason.split()[-1]) for reason in selection.reasons[: len(weighted)]]
        assert reported == pytest.approx([valuations[row] for row in weighted], rel=1e-3)
        assert set(selection.reasons[len(weighted) :]) <= {"drawn uniformly"}

        arrived = selection.rows[generator.random(size) < 0.7]
        state = selector.observe(
            state, replace(outcome(number, selection, answers), included=arrived)
        )
        for each in answers:
            told = each.values["loss"].tolist()
            losses |= dict(zip(each.rows.tolist(), told, strict=True))
    assert len(losses) >= 8
