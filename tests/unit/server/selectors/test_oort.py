import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import ArrayLike
from support.plain_loops import limited
from support.populations import context, outcome, population, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import RoundOutcome, Selection, Selector
from potluck.server.selectors.oort import Oort, Scoring, preferred_seconds, staleness
from potluck.server.state import State

SCORING = Scoring(penalty=2.0, clip=0.95)


def known(utility: ArrayLike, seconds: ArrayLike, *, round_number: int = 1) -> State:
    """Return a state in which all clients were seen in the same round."""
    utilities = np.array(utility, dtype=np.float64)
    return State(
        scalars={"percentile": 50.0},
        arrays={
            "utility": utilities,
            "seconds": np.array(seconds, dtype=np.float64),
            "last_seen": np.full(len(utilities), round_number, dtype=np.int64),
            "window": np.zeros(0),
        },
    )


def ended(number: int, rows: list[int], utility: ArrayLike, seconds: ArrayLike) -> RoundOutcome:
    selection = Selection(rows=np.array(rows, dtype=np.int64), reasons=["because"] * len(rows))
    return replace(
        outcome(number, selection, utility=utility),
        seconds=np.array(seconds, dtype=np.float64),
        deadline_seconds=600.0,
    )


def test_speed_and_staleness_equal_the_worked_example() -> None:
    """A worked example: the speed factor of a client twice as slow, and a staleness bonus."""
    utility = 6.48074
    assert utility * SCORING.speed(np.array([20.0]), 10.0)[0] == pytest.approx(1.62019, abs=1e-5)
    assert staleness(np.array([50.0]), 100)[0] == pytest.approx(0.09597, abs=1e-5)


def test_speed_factor_of_fast_clients_is_1() -> None:
    speed = SCORING.speed(np.array([1.0, 10.0, 40.0, np.nan]), 10.0)
    assert speed.tolist() == [1.0, 1.0, 0.0625, 1.0]


def test_exploration_reaches_its_minimum_at_step_75_or_30() -> None:
    slow, fast = Oort(), Oort(exploration_decay=0.95)
    assert slow.exploration_in(1) == 0.9
    assert slow.exploration_in(75) > slow.exploration_in(76) == 0.2
    assert fast.exploration_in(30) > fast.exploration_in(31) == 0.2


def test_utilities_are_clipped_at_a_quantile_and_scaled() -> None:
    utilities = np.append(np.arange(100.0), 1e12)
    scaled = SCORING.exploited(utilities)
    assert scaled.max() == scaled[95] == scaled[-1] == 1.0
    assert scaled[50] == pytest.approx(50 / 95)
    assert SCORING.exploited(np.full(4, 3.0)).tolist() == [0.0] * 4
    assert SCORING.exploited(np.zeros(4)).tolist() == [0.0] * 4


def test_preferred_duration_is_a_percentile_of_the_known_durations() -> None:
    seconds = np.array([np.nan, 1.0, 2.0, 3.0, 4.0])
    assert preferred_seconds(seconds, 50) == 2.0
    assert preferred_seconds(seconds, 0) == 1.0
    assert preferred_seconds(seconds, 100) == math.inf
    assert preferred_seconds(np.full(3, np.nan), 50) == math.inf


def test_oort_cohort_mixes_high_utility_clients_with_unseen_ones() -> None:
    """Ten seen, ten not; ε = 0.4 of a cohort of 5."""
    federation = population(20)
    state = known(np.arange(10.0), np.ones(10))
    selector = Oort(exploration=0.4, exploration_minimum=0.4, clip=1.0)
    selection = select(selector, state, context(federation, 5, number=2))
    assert (selection.rows < 10).tolist() == [True] * 3 + [False] * 2
    assert sorted(selection.rows[:3].tolist()) == [7, 8, 9]
    assert selection.reasons[3] == "not seen before"
    assert all(reason.startswith("utility ") for reason in selection.reasons[:3])


@pytest.mark.parametrize(("clients", "seen", "count"), [(10, 10, 10), (10, 4, 10), (6, 6, 4)])
def test_oort_cohort_is_complete_if_all_places_are_exploited(
    clients: int, seen: int, count: int
) -> None:
    state = known(np.arange(float(seen)), np.ones(seen))
    selection = select(Oort(), state, context(population(clients), count, number=2))
    assert len(selection.rows) == count


def test_oort_avoids_slow_clients_unless_the_penalty_is_zero() -> None:
    """The client of highest utility is ten times as slow: its score is multiplied by (1/10)²."""
    state = known([9.0, 8.0, 8.0, 1.0], [10.0, 1.0, 1.0, 1.0])
    selector = Oort(exploration=0.0)
    picks = {
        int(row)
        for seed in range(50)
        for row in select(selector, state, context(population(4), 2, number=2, seed=seed)).rows
    }
    assert picks == {1, 2}
    without = Oort(exploration=0.0, penalty=0)
    [best] = select(without, state, context(population(4), 1, number=2)).rows
    assert best == 0


def test_oort_records_utility_duration_and_round_of_each_update() -> None:
    selector = Oort()
    state = selector.observe(
        selector.init(population(4)), ended(3, [2, 0], utility=[5.0, 7.0], seconds=[11.0, 13.0])
    )
    assert state.arrays["utility"][[2, 0]].tolist() == [5.0, 7.0]
    assert state.arrays["seconds"][[2, 0]].tolist() == [11.0, 13.0]
    assert state.arrays["last_seen"].tolist() == [3, 0, 3, 0]


def test_failed_client_gets_the_deadline_as_duration_and_keeps_its_utility() -> None:
    selector = Oort()
    state = selector.observe(
        selector.init(population(3)), ended(1, [0, 1], utility=[5.0, 6.0], seconds=[1.0, 2.0])
    )
    failed = ended(2, [0, 2], utility=[np.nan, np.nan], seconds=[np.nan, np.nan])
    state = selector.observe(state, replace(failed, included=failed.selected[:0]))
    assert state.arrays["utility"][0] == 5.0
    assert state.arrays["seconds"].tolist() == [600.0, 2.0, 600.0]
    assert state.arrays["last_seen"].tolist() == [1, 1, 0]


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -np.inf, -3.0])
def test_invalid_utilities_and_durations_are_discarded(nonsense: float) -> None:
    selector = Oort()
    state = selector.observe(
        selector.init(population(2)),
        ended(1, [0, 1], utility=[nonsense, 2.0], seconds=[nonsense, 1]),
    )
    assert state.arrays["utility"].tolist() == [0.0, 2.0]
    assert np.isnan(state.arrays["seconds"][0])


def paced(window: list[float], *, number: int = 40, percentile: float = 50.0) -> float:
    state = known(np.ones(1), np.ones(1))
    given = State(
        scalars={"percentile": percentile},
        arrays=dict(state.arrays) | {"window": np.array(window[:-1])},
    )
    after = Oort().observe(given, ended(number, [0], utility=[window[-1]], seconds=[1.0]))
    result = after.scalars["percentile"]
    assert isinstance(result, float)
    return result


def test_pacer_adapts_the_preferred_duration_to_the_change_of_utility() -> None:
    """Flat utility raises the duration, a fivefold change lowers it, a smaller one keeps it."""
    flat, falling, sharp = [1.0] * 40, [2.0] * 20 + [1.0] * 20, [0.1] * 20 + [1.0] * 20
    assert paced(flat) == 55.0
    assert paced(flat, percentile=98.0) == 100.0
    assert paced(falling) == 50.0
    assert paced(sharp) == 45.0
    assert paced(sharp, percentile=5.0) == 5.0
    assert paced(flat, number=39) == 50.0
    assert paced([1.0] * 20, number=20) == 50.0


@pytest.mark.parametrize(
    "options",
    [
        {"exploration": 1.5},
        {"exploration_decay": -0.1},
        {"penalty": math.inf},
        {"pacer_rounds": 0},
        {"percentile": 101},
        {"cutoff": math.nan},
        {"clip": True},
    ],
)
def test_oort_option_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Selector, "oort", options)


def test_oort_selects_with_utilities_of_any_size() -> None:
    """Two of the largest doubles have no mean."""
    selector = Oort(exploration=0.0)
    federation = population(2)
    state = selector.init(federation)
    for number in range(1, 4):
        selection = select(selector, state, context(federation, 2, number=number))
        told = outcome(number, selection, utility=[1e308, 1e308])
        state = selector.observe(state, replace(told, seconds=np.array([1e308, 1e308])))
        assert sorted(selection.rows.tolist()) == [0, 1]


class PlainOort:
    """Oort in plain loops. last: L, the last round in which each client's update arrived. history:
    mean utility of the clients chosen by score, in each round."""

    def __init__(self, options: Mapping[str, float]) -> None:
        self.options, self.percentile = options, options["percentile"]
        self.utility: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        self.last: dict[int, int] = {}
        self.history: list[float] = []

    def speed(self, row: int) -> float:
        seconds = limited(self.seconds, 100)
        share, preferred = self.percentile / 100, math.inf
        for number, duration in enumerate(sorted(seconds.values()), 1):
            if share < 1 and number >= share * len(seconds):
                preferred = min(preferred, duration)
        if row not in seconds or seconds[row] <= preferred:
            return 1.0
        penalty: float = (preferred / seconds[row]) ** self.options["penalty"]
        return penalty

    def scores(self, rows: Sequence[int], number: int) -> dict[int, float]:
        known = limited({row: self.utility[row] for row in rows}, 100)
        ascending, place = sorted(known.values()), self.options["clip"] * (len(rows) - 1)
        below, above = ascending[math.floor(place)], ascending[math.ceil(place)]
        most = below + (place - math.floor(place)) * (above - below)
        least = min(ascending)
        found = {}
        for row in rows:
            exploited = (min(known[row], most) - least) / (most - least) if most > least else 0.0
            uncertain = math.sqrt(0.1 * math.log(number) / self.last[row])
            found[row] = (exploited + uncertain) * self.speed(row)
        return found

    def exploited(self, seen: int, unseen: int, size: int, number: int) -> int:
        """Return the number of clients that are chosen by score."""
        decayed = self.options["exploration"] * self.options["exploration_decay"] ** (number - 1)
        share = 1 - max(decayed, self.options["exploration_minimum"])
        return min(max(math.floor(share * size + 1e-9), size - unseen), seen)

    def learn(
        self, number: int, arrived: Mapping[int, tuple[float, float]], failed: Sequence[int]
    ) -> None:
        """Store a round. arrived: utility and seconds of each client whose update arrived."""
        told = {row: utility if utility >= 0 else 0.0 for row, (utility, _) in arrived.items()}
        values = [told[row] for row in arrived if row in self.last]
        self.history.append(sum(values) / len(values) if values else 0.0)
        self.seconds |= dict.fromkeys(failed, 600.0)
        self.seconds |= {row: time for row, (_, time) in arrived.items() if time >= 0}
        self.utility |= told
        self.last |= dict.fromkeys(arrived, number)
        width, step = int(self.options["pacer_rounds"]), self.options["pacer_step"]
        before, lately = sum(self.history[-2 * width : -width]), sum(self.history[-width:])
        if number % width or number < 2 * width or not before:
            return
        if abs(lately - before) <= 0.1 * before:
            self.percentile = min(100.0, self.percentile + step)
        elif abs(lately - before) >= 5 * before:
            self.percentile = max(min(step, self.percentile), self.percentile - step)


def plain_draw(weights: Mapping[int, float], size: int, twin: np.random.Generator) -> list[int]:
    """Draw without replacement: the clients whose exponential waiting times, with their weights as
    rates, end first. Clients of weight 0 come last."""
    first, second = twin.exponential(size=(2, len(weights))).tolist()
    waits = {
        row: (first[place] / weight if weight else math.inf, second[place])
        for place, (row, weight) in enumerate(weights.items())
    }
    return sorted(waits, key=lambda row: waits[row])[:size]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("penalty", "cutoff", "clip", "percentile"),
    [(2.0, 0.95, 0.95, 10.0), (0.5, 0.3, 0.7, 50.0), (1.0, 0.6, 1.0, 97.0)],
)
def test_rounds_agree_with_a_second_implementation(
    penalty: float, cutoff: float, clip: float, percentile: float, seed: int
) -> None:
    options = {"penalty": penalty, "cutoff": cutoff, "clip": clip, "percentile": percentile}
    options |= {"exploration": 0.9, "exploration_decay": 0.8, "exploration_minimum": 0.2}
    options |= {"pacer_step": 5.0}
    selector, plain = Oort(pacer_rounds=3, **options), PlainOort(options | {"pacer_rounds": 3})
    generator = np.random.default_rng(seed)
    federation = replace(population(14), samples=generator.integers(1, 9, 14))
    state, paces = selector.init(federation), set[float]()
    for number in range(1, 25):
        here = np.flatnonzero(generator.random(14) < 0.8)
        given = context(federation, 5, number=number, seed=seed, available=here)
        rows = select(selector, state, given).rows
        picked, twin, size = rows.tolist(), given.generator("oort"), min(5, len(here))
        seen = [row for row in here.tolist() if row in plain.last]
        unseen = [row for row in here.tolist() if row not in plain.last]
        failed = [row for row in unseen if row in plain.seconds]
        if failed:
            put_off = {row for row in failed if twin.random() >= 0.1}
            fresh = [row for row in unseen if row not in put_off]
            unseen = fresh if len(seen) + len(fresh) >= size else unseen
        count = plain.exploited(len(seen), len(unseen), size, number)
        expected: list[int] = []
        if count:
            scores = plain.scores(seen, number)
            least = sorted(scores.values())[-count]
            enough = {row: score for row, score in scores.items() if score >= cutoff * least}
            expected = plain_draw(enough, count, twin)
        sizes = {row: int(federation.samples[row]) * plain.speed(row) for row in unseen}
        assert picked == expected + plain_draw(sizes, size - count, twin)

        came = generator.random(size) < 0.85
        usual = [np.nan, -1, 0, 2, 3, 3, 900] if number < 12 else [2.8, 3, 3.2]  # flat at the end
        utility = 10.0 ** (number == 8) * generator.choice(usual, size)
        seconds = generator.choice([np.nan, 1, 2, 2, 3, 5, 1e4], size)
        round_ended = ended(
            number, picked, np.where(came, utility, np.nan), np.where(came, seconds, np.nan)
        )
        state = selector.observe(state, replace(round_ended, included=rows[came]))
        told = zip(utility[came].tolist(), seconds[came].tolist(), strict=True)
        arrived = dict(zip(rows[came].tolist(), told, strict=True))
        plain.learn(number, arrived, rows[~came].tolist())
        assert state.arrays["window"] == pytest.approx(plain.history[-6:])
        assert state.scalars["percentile"] == plain.percentile
        paces.add(plain.percentile)
    assert len(plain.last) >= 13  # a client may have failed whenever it was chosen
    assert len(paces) > 1


def test_a_client_that_always_fails_is_not_tried_in_every_round() -> None:
    selector, federation = Oort(), population(12)
    state, tried = selector.init(federation), 0
    for number in range(1, 41):
        rows = select(selector, state, context(federation, 4, number=number)).rows
        failing = rows == 3
        tried += int(failing.any())
        seconds = np.where(failing, np.nan, 5.0)
        ending = ended(number, rows.tolist(), np.where(failing, np.nan, 1.0), seconds)
        state = selector.observe(state, replace(ending, included=rows[~failing]))
    assert 1 <= tried <= 13  # by chance, a client is in a third of the cohorts
