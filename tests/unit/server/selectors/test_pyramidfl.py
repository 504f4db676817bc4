import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import Generator
from support.plain_loops import limited
from support.populations import context, facts_of, outcome, population, rounds, select

from potluck.common.errors import ConfigurationError
from potluck.server.selection import RoundOutcome, Selection, SelectionContext, UpdateFact
from potluck.server.selectors.oort import Oort
from potluck.server.selectors.pyramidfl import (
    PyramidFL,
    dropped_shares,
    gradient_utilities,
    passes,
    round_seconds,
)
from potluck.server.state import State

TENSORS = [f"{layer}.weight" for layer in range(10)]
BOTH = PyramidFL(prolong=True, drop=True, exploration=0.0)


def known(seconds: list[float], gradients: list[float]) -> State:
    """Return a state in which all clients were seen in round 1, with equal utilities."""
    clients = len(seconds)
    return State(
        scalars={"percentile": 100.0},
        arrays={
            "utility": np.ones(clients),
            "seconds": np.array(seconds),
            "last_seen": np.ones(clients, dtype=np.int64),
            "window": np.zeros(0),
            "gradient": np.array(gradients),
        },
    )


def chosen(state: State, count: int, *, number: int = 2, spares: int = 0) -> Selection:
    federation = population(len(state.arrays["seconds"]))
    given_context: SelectionContext = replace(
        context(federation, count, number=number), spares=spares, epochs=5, tensors=TENSORS
    )
    return select(BOTH, state, given_context)


def by_row(selection: Selection) -> dict[int, tuple[int, int]]:
    """Return (passes, number of tensors left out) of each client, by row."""
    assert selection.epochs is not None
    assert selection.dropped is not None
    told = zip(selection.epochs.tolist(), map(len, selection.dropped), strict=True)
    return dict(zip(selection.rows.tolist(), told, strict=True))


def test_number_of_passes_equals_the_worked_example() -> None:
    """A worked example: T = 100, t = 40, t_comp = 20, E = 5 make 4 times the epochs."""
    found = passes(np.array([40.0]), np.array([20.0]), 100.0, 5, longest=10.0)
    assert (found / 5).tolist() == [4.0]


def test_number_of_passes_lies_between_that_of_the_run_and_the_maximum() -> None:
    seconds = np.array([1e-6, 100.0, 101.0, np.nan, 99.0])
    assert passes(seconds, seconds, 100.0, 5, longest=10.0).tolist() == [55, 5, 5, 5, 5]
    assert passes(seconds, seconds, 100.0, 2, longest=0.0).tolist() == [2] * 5
    assert passes(seconds, seconds, -math.inf, 2, longest=10.0).tolist() == [2] * 5


def test_round_duration_is_that_of_the_slowest_client_not_spared() -> None:
    seconds = np.array([4.0, np.nan, 1.0, 3.0, 2.0])
    assert [round_seconds(seconds, last) for last in (0, 1, 3, 4, 5)] == [1.0, 1.0, 3.0, 4.0, 4.0]
    assert round_seconds(np.full(2, np.nan), 2) == -math.inf


def test_share_of_dropped_tensors_falls_with_the_update_utility() -> None:
    shares = dropped_shares(np.array([1.0, 9.0, np.nan, 4.0, 9.0]), 0.1, 0.6)
    np.testing.assert_allclose(shares, [0.6, 0.1, 0.0, 0.1 + 0.5 * 2 / 3, 0.1])
    assert dropped_shares(np.array([3.0]), 0.1, 0.6).tolist() == [0.1]
    assert dropped_shares(np.full(2, np.nan), 0.1, 0.6).tolist() == [0.0, 0.0]


def test_gradient_utilities_are_those_of_complete_updates() -> None:
    found = facts_of([[3.0, 4.0, 0.0], [0.0, 0.0, 4.0]])
    assert gradient_utilities(found).tolist() == pytest.approx([0.25, 0.2])
    partial = replace(found, shares=np.array([0.25, 1.0]))
    assert gradient_utilities(partial).tolist() == pytest.approx([0.5, 0.2])
    wild = replace(found, norms=np.array([np.nan, np.inf]))
    assert gradient_utilities(wild).tolist() == pytest.approx([0.0, 5e7])


def test_fast_clients_train_more_passes_and_low_utility_clients_drop_tensors() -> None:
    state = known([10.0, 20.0, 40.0, 40.0], [9.0, 1.0, 5.0, np.nan])
    told = by_row(chosen(state, 4))
    assert {row: epochs for row, (epochs, _) in told.items()} == {0: 20, 1: 10, 2: 5, 3: 5}
    left_out = {row: count for row, (_, count) in told.items()}
    assert left_out[3] == 0
    assert left_out[0] == 1
    assert left_out[1] == 6
    assert left_out[2] in (3, 4)  # a share of 0.35 of ten tensors
    reasons = dict(zip(chosen(state, 4).rows.tolist(), chosen(state, 4).reasons, strict=True))
    assert "has time for 20 passes; leaves out 1 of 10 tensors" in reasons[0]
    assert "passes" not in reasons[3]
    assert "tensors" not in reasons[3]


def test_passes_are_computed_without_the_spared_slowest_client() -> None:
    state = known([10.0, 20.0, 40.0, 4000.0], [1.0] * 4)
    told = by_row(chosen(state, 4, spares=1))
    assert {row: epochs for row, (epochs, _) in told.items()} == {0: 20, 1: 10, 2: 5, 3: 5}


@given(st.floats(0.1, 1.0), st.floats(0.0, 20.0))
def test_passes_converge_until_a_client_fills_the_round_duration(
    computing: float, way: float
) -> None:
    """Even with time for transfers, a client never takes longer than the slowest one."""
    federation, slowest, epochs = population(2), 40.0, 5
    state = known([way + computing, slowest], [1.0, 1.0])
    before = 0
    for number in range(2, 12):
        given_context = replace(
            context(federation, 2, number=number), epochs=epochs, tensors=TENSORS
        )
        selection = select(BOTH, state, given_context)
        assert selection.epochs is not None
        factors = selection.epochs / epochs
        usual = {0: (way, computing), 1: (0.0, slowest)}
        seconds = np.array(
            [
                usual[row][0] + usual[row][1] * factor
                for row, factor in zip(selection.rows.tolist(), factors, strict=True)
            ]
        )
        assert seconds.max() <= slowest * (1 + 1e-9)
        quick = int(selection.epochs[selection.rows.tolist().index(0)])
        assert quick >= before - 1
        before = quick
        ended = replace(outcome(number, selection, utility=[1.0, 1.0]), seconds=seconds)
        state = BOTH.observe(state, replace(ended, prolonged=factors))
    assert before == min(11 * epochs, math.floor((slowest - way) / computing * epochs)) or (
        way + computing * (before + 1) / epochs > slowest * 0.9
    )


def test_pyramidfl_without_options_selects_as_oort() -> None:
    federation = population(30)
    mine = [(s.rows.tolist(), s.reasons) for s in rounds(PyramidFL(), federation, 5, 8)]
    assert mine == [(s.rows.tolist(), s.reasons) for s in rounds(Oort(), federation, 5, 8)]
    [first] = rounds(PyramidFL(), federation, 5, 1)
    assert (first.epochs, first.dropped) == (None, None)


def test_pyramidfl_declares_the_needs_of_its_options() -> None:
    plain = PyramidFL()
    assert (plain.sets_epochs, plain.drops_tensors, plain.needs_facts) == (
        False,
        False,
        frozenset(),
    )
    assert (BOTH.sets_epochs, BOTH.drops_tensors, BOTH.needs_facts) == (
        True,
        True,
        frozenset({UpdateFact.NORM}),
    )


def test_only_tensor_of_a_model_is_never_dropped() -> None:
    state = known([10.0, 20.0], [1.0, 2.0])
    given_context = replace(context(population(2), 2, number=2), tensors=["0.weight"])
    selection = select(PyramidFL(drop=True, most_dropped=1.0), state, given_context)
    assert selection.dropped == [[], []]


def test_minimum_drop_share_above_the_maximum_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="swap them"):
        PyramidFL(least_dropped=0.7)


class PlainPyramidFL:
    """PyramidFL in plain loops, without Oort's pacer and clipping. last: the last round in which
    each client's update arrived. seconds: durations for the run's passes. sizes: ‖Δ‖ · samples."""

    def __init__(self, percentile: float) -> None:
        self.percentile = percentile
        self.utility: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        self.last: dict[int, int] = {}
        self.sizes: dict[int, float] = {}

    def speed(self, row: int) -> float:
        known = limited(self.seconds, 100)
        place = max(1, math.ceil(self.percentile / 100 * len(known)))
        preferred = sorted(known.values())[place - 1] if known else math.inf
        return (preferred / known[row]) ** 2 if known.get(row, 0.0) > preferred else 1.0

    def scores(self, rows: Sequence[int], number: int) -> dict[int, float]:
        known, found = limited({row: self.utility[row] for row in rows}, 100), {}
        least, most = min(known.values()), max(known.values())
        for row in rows:
            share = (known[row] - least) / (most - least) if most > least else 0.0
            stale = math.sqrt(0.1 * math.log(number) / self.last[row])
            found[row] = (share + stale) * self.speed(row)
        return found

    def cohort(
        self, seen: Sequence[int], new: Sequence[int], size: int, number: int, twin: Generator
    ) -> list[int]:
        put_off = {row for row in new if row in self.seconds and twin.random() >= 0.1}
        if len(seen) + len(new) - len(put_off) >= size:
            new = [row for row in new if row not in put_off]
        share = 1 - max(0.2, 0.9 * 0.8 ** (number - 1))
        count = min(max(math.floor(share * size + 1e-9), size - len(new)), len(seen))
        scores = self.scores(seen, number) if count else {}
        least = sorted(scores.values())[-count] if count else 0.0
        enough = {row: score for row, score in scores.items() if score >= 0.5 * least}
        drawn = plain_draw(enough, count, twin) if count else []
        return drawn + plain_draw({row: self.speed(row) for row in new}, size - count, twin)

    def passes(self, cohort: Sequence[int], spares: int, usual: int, longest: float) -> list[int]:
        every = {row: max(value, 1e-6) for row, value in limited(self.seconds, 10).items()}
        known, found = sorted(every[row] for row in cohort if row in every), []
        for row in cohort:
            last = min(max(1, len(cohort) - spares), len(known))
            left = max(0.0, known[last - 1] - every[row]) if row in every else 0.0
            more = math.floor(left / (every[row] / usual)) if left else 0
            found.append(usual + min(more, math.floor(longest * usual)))
        return found

    def omitted(
        self, cohort: Sequence[int], names: Sequence[str], twin: Generator
    ) -> list[list[str]]:
        known, found = [self.sizes[row] for row in cohort if row in self.sizes], list[list[str]]()
        for row in cohort:
            larger = sum(size > self.sizes.get(row, math.inf) for size in known)
            share = 0.1 + 0.5 * larger / max(1, len(known) - 1) if row in self.sizes else 0.0
            count = min(math.floor(share * len(names) + twin.random()), len(names) - 1)
            places = twin.choice(len(names), count, replace=False).tolist() if count else []
            found.append([names[place] for place in sorted(places)])
        return found


def plain_draw(weights: Mapping[int, float], size: int, twin: Generator) -> list[int]:
    """Draw without replacement: the clients whose exponential waiting times, with their weights as
    rates, end first. Clients of weight 0 come last."""
    first, second = twin.exponential(size=(2, len(weights))).tolist()
    waits = {
        row: (first[place] / weight if weight else math.inf, second[place])
        for place, (row, weight) in enumerate(weights.items())
    }
    return sorted(waits, key=lambda row: waits[row])[:size]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("percentile", "longest", "spares"), [(50.0, 10.0, 0), (20.0, 2.5, 1), (90.0, 0.5, 2)]
)
def test_rounds_agree_with_a_second_implementation(
    percentile: float, longest: float, spares: int, seed: int
) -> None:
    """Many durations, utilities and updates are equal, some updates fail, and some durations are
    far above the others or unknown. Clients 11 to 13 join in round 6."""
    selector = PyramidFL(
        exploration_decay=0.8,
        pacer_rounds=100,
        percentile=percentile,
        cutoff=0.5,
        clip=1.0,
        prolong=True,
        longest=longest,
        drop=True,
    )
    generator, plain = np.random.default_rng(seed), PlainPyramidFL(percentile)
    state, kinds = selector.init(population(11)), Counter[str]()
    for number in range(1, 19):
        clients, tensors = (14 if number >= 6 else 11), TENSORS[: 1 + number % 7]
        here = np.flatnonzero(generator.random(clients) < 0.8)
        given_context = replace(
            context(population(clients), 6, number=number, seed=seed, available=here),
            spares=spares,
            epochs=4,
            tensors=tensors,
        )
        selection, size = select(selector, state, given_context), min(6, len(here))
        seen = [row for row in here.tolist() if row in plain.last]
        new = [row for row in here.tolist() if row not in plain.last]
        cohort = plain.cohort(seen, new, size, number, given_context.generator("oort"))
        assert selection.rows.tolist() == cohort
        utilities = limited({row: plain.utility[row] for row in seen}, 100)
        for row, reason in zip(cohort, selection.reasons, strict=True):
            said = reason.replace(";", ",").split(",")[0]
            assert said == (f"utility {utilities[row]:.4g}" if row in seen else "not seen before")
        assert selection.epochs is not None
        assert selection.epochs.tolist() == plain.passes(cohort, spares, 4, longest)
        omitted = plain.omitted(cohort, tensors, given_context.generator("pyramidfl"))
        assert selection.dropped == omitted
        kinds["prolonged"] += int((selection.epochs > 4).sum())
        kinds["omitted"] += sum(map(bool, omitted))

        came, factors = generator.random(size) < 0.8, selection.epochs / 4
        seconds = generator.choice([0, 8, 8, 12, 40, 40, 400, np.nan], size)
        utility = generator.choice([-1, 0, 2, 3, 3, 900], size)
        rows = selection.rows[came]
        found = replace(
            facts_of(np.ones((len(rows), 3)), rows=rows),
            norms=generator.choice([0, 1, 1, 2, 5], len(rows)),
            samples=generator.choice([10.0, 10.0, 40.0], len(rows)),
            shares=generator.choice([1, 1, 0.25], len(rows)),
        )
        ended = RoundOutcome(
            round=number,
            selected=selection.rows,
            included=rows,
            seconds=np.where(came, seconds * factors, np.nan),
            reports={"utility": np.where(came, utility, np.nan)},
            facts=found,
            prolonged=factors,
            deadline_seconds=600.0,
        )
        state = selector.observe(state, ended)
        for row, arrived, duration, worth in zip(cohort, came, seconds, utility, strict=True):
            if not arrived:
                plain.seconds[row] = 600.0
            else:
                plain.last[row], plain.utility[row] = number, max(0.0, float(worth))
                plain.seconds |= {} if math.isnan(duration) else {row: float(duration)}
        for row, norm, samples, share in zip(
            rows.tolist(), found.norms, found.samples, found.shares, strict=True
        ):
            plain.sizes[row] = norm / math.sqrt(share) * samples
    assert kinds["prolonged"] >= 10
    assert kinds["omitted"] >= 20
