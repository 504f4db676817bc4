import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.plain_loops import position_at
from support.populations import context, labelled, outcome, population, rounds, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Floats, Selector
from potluck.server.selectors.fed_cbs import FedCBS, Pool
from potluck.server.selectors.parts.parallel import passes
from potluck.server.state import State

FIGURE = [[5] * 6, [6, 6, 6, 6, 6, 0], [0, 0, 0, 10, 10, 10], [10, 10, 10, 0, 0, 0]]
"""Label counts of the paper's example: of four clients, 0, 2 and 3 together are balanced."""
UNEVEN = [[8, 1, 1], [0, 6, 0], [1, 2, 4], [5, 5, 0]]


def qcid(table: Sequence[Sequence[float]], cohort: Sequence[int]) -> float:
    """Return QCID as in the paper, from inner products of clients' label distributions."""
    sizes = [sum(table[k]) for k in cohort]
    shares = [[n / size for n in table[k]] for k, size in zip(cohort, sizes, strict=True)]
    pairs = itertools.product(range(len(cohort)), repeat=2)
    inner = sum(
        sizes[i] * sizes[j] * math.fsum(a * b for a, b in zip(shares[i], shares[j], strict=True))
        for i, j in pairs
    )
    return inner / sum(sizes) ** 2 - 1 / len(table[0])


def chain(
    table: Sequence[Sequence[float]],
    count: int,
    *,
    number: int = 1,
    selections: Sequence[int] | None = None,
    exploration: float = 10.0,
) -> dict[tuple[int, ...], float]:
    """Return the probability of each ordered cohort, from the paper's conditional probabilities."""
    before = selections or [0] * len(table)

    def bonus(client: int) -> float:
        return exploration * math.sqrt(3 * math.log(number) / (2 * (1 + before[client])))

    def first(client: int) -> float:
        return 1 / qcid(table, [client]) + bonus(client)

    def weight(cohort: tuple[int, ...], client: int) -> float:
        place = len(cohort) + 1
        if place == 1:
            return first(client)
        added = qcid(table, [*cohort, client]) ** place
        if place == 2:
            return 1 / added / first(cohort[0])
        return qcid(table, cohort) ** (place - 1) / added

    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        longer: dict[tuple[int, ...], float] = {}
        for cohort, chance in found.items():
            others = [k for k in range(len(table)) if k not in cohort]
            weights = [weight(cohort, k) for k in others]
            for client, each in zip(others, weights, strict=True):
                longer[(*cohort, client)] = chance * each / sum(weights)
        found = longer
    return found


def test_class_imbalance_equals_the_example_of_the_paper() -> None:
    pool = Pool(np.array(FIGURE, dtype=np.float64))
    with passes(4) as run:
        assert pool.imbalances(run) == pytest.approx([0, 1 / 30, 1 / 6, 1 / 6])
        pool.take(0)
        pool.take(2)
        found = pool.imbalances(run).tolist()
    assert found == [math.inf, pytest.approx(qcid(FIGURE, [0, 1, 2])), math.inf, pytest.approx(0)]
    assert qcid(FIGURE, [0, 1, 2]) == pytest.approx(2 / 135)


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.float64, (7, 4), elements=st.integers(1, 60)), st.permutations(range(7)))
def test_class_imbalances_equal_their_definition(counts: Floats, order: list[int]) -> None:
    pool = Pool(counts)
    for size in (2, 3):
        pool.take(order[size])
    with passes(7) as run:
        found = pool.imbalances(run)
    for client in set(range(7)) - {order[2], order[3]}:
        expected = qcid(counts.tolist(), [order[2], order[3], client])
        assert found[client] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("number", "selections"), [(1, [0, 0, 0, 0]), (20, [9, 0, 2, 30])])
def test_fed_cbs_draws_cohorts_with_the_probabilities_of_the_paper(
    number: int, selections: list[int]
) -> None:
    """Each of the 24 ordered cohorts is within four and a half deviations in 1500 draws."""
    given_table, draws = labelled(UNEVEN), 1500
    expected = chain(UNEVEN, 3, number=number, selections=selections)
    assert sum(expected.values()) == pytest.approx(1)
    state = State(arrays={"selections": np.array(selections)})
    drawn = Counter(
        tuple(
            select(FedCBS(), state, context(given_table, 3, number=number, seed=seed)).rows.tolist()
        )
        for seed in range(draws)
    )
    assert set(drawn) <= set(expected)
    for cohort, chance in expected.items():
        deviation = math.sqrt(draws * chance * (1 - chance))
        assert abs(drawn[cohort] - draws * chance) < 4.5 * deviation + 1, cohort


def plain_cohort(
    table: Sequence[Sequence[float]],
    rows: Sequence[int],
    size: int,
    weights: tuple[float, float],
    selections: Sequence[int],
    number: int,
    twin: np.random.Generator,
) -> list[int]:
    """Draw one client after another, by QCID from its definition. rows: available clients with
    labels. weights: `exploration` and `power`. selections: how often each client was selected."""
    exploration, power = weights
    cohort: list[int] = []
    while len(cohort) < min(size, len(rows)):
        left = [row for row in rows if row not in cohort]
        chances = []
        for row in left:
            imbalance = max(qcid(table, [*cohort, row]), 1e-6)
            chances.append(imbalance ** (-power * (len(cohort) + 1)))
            if not cohort:
                tries = 1 + selections[row]
                chances[-1] += exploration * math.sqrt(3 * math.log(number) / (2 * tries))
        cohort.append(left[position_at(chances, twin.random())])
    return cohort


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weights", [(10.0, 1.0), (0.0, 0.3), (2.0, 2.5)])
def test_rounds_agree_with_a_second_implementation(weights: tuple[float, float], seed: int) -> None:
    """Some clients are unavailable, some updates fail, clients 8 and 9 have no labels, and clients
    10 and 11 join in round 5."""
    generator = np.random.default_rng(seed)
    table = generator.integers(0, 30, (12, 3)).astype(np.float64)
    table[0], table[3, 0] = [7, 7, 7], -4
    table[8], table[9] = [-1, 0, -2], np.nan
    counts = table.clip(min=0).tolist()
    exploration, power = weights
    selector = FedCBS(exploration=exploration, power=power)
    state, selections = selector.init(labelled(table[:10].tolist())), [0] * 12
    for number in range(1, 21):
        clients = 12 if number >= 5 else 10
        here = np.flatnonzero(generator.random(clients) < 0.6)
        federation = labelled(table[:clients].tolist())
        given_context = context(federation, 5, number=number, seed=seed, available=here)
        selection, twin = select(selector, state, given_context), given_context.generator("fed-cbs")
        rows = [row for row in here.tolist() if row not in (8, 9)]
        expected = plain_cohort(counts, rows, 5, weights, selections, number, twin)
        reached = [qcid(counts, expected[: place + 1]) for place in range(len(expected))]
        reported = [float(reason.split()[-1]) for reason in selection.reasons[: len(reached)]]
        assert reported == pytest.approx(reached, abs=0.00006)
        rest = [row for row in here.tolist() if row not in expected]
        missing = min(5, len(here)) - len(expected)
        if missing:
            expected += twin.choice(np.array(rest), missing, replace=False).tolist()
        assert selection.rows.tolist() == expected
        included = selection.rows[generator.random(len(expected)) < 0.7]
        state = selector.observe(state, replace(outcome(number, selection), included=included))
        for row in expected:
            selections[row] += 1
        stored = state.arrays["selections"].tolist()
        assert stored == selections[: len(stored)]
    assert sum(selections[8:10]) > 0


def test_fed_cbs_cohorts_have_more_even_labels_than_random_ones() -> None:
    generator = np.random.default_rng(3)
    owns = np.stack([generator.permutation([30, 30, 1, 0, 0, 0, 0, 0, 0, 0]) for _ in range(60)])
    federation = labelled(owns.tolist())

    def mean(selector: Selector) -> float:
        chosen = rounds(selector, federation, 10, 40)
        return float(np.mean([qcid(owns.tolist(), s.rows.tolist()) for s in chosen]))

    assert mean(FedCBS()) < 0.5 * mean(create(Selector, "uniform", {}))


def test_fed_cbs_rarely_selects_an_often_selected_client_first() -> None:
    same = labelled([[4, 1]] * 4)
    state = State(arrays={"selections": np.array([400, 400, 0, 400])})
    first = Counter(
        int(select(FedCBS(), state, context(same, 1, number=50, seed=seed)).rows[0])
        for seed in range(200)
    )
    assert first[2] > 120


def test_fed_cbs_selects_clients_without_samples_or_profile_last() -> None:
    table = [[0.0, 0.0], [3.0, 4.0], [math.nan, math.nan], [-5.0, -2.0], [4.0, 3.0]]
    federation = population(5, classes=2, label_counts=table)
    for seed in range(10):
        selector = FedCBS()
        found = select(selector, selector.init(federation), context(federation, 4, seed=seed))
        assert set(found.rows[:2].tolist()) == {1, 4}
        assert found.reasons[1] == "imbalance of the labels becomes 0.0000"
        assert found.reasons[2] == found.reasons[3] == "no label counts; drawn uniformly"


@pytest.mark.parametrize(
    "options", [{"exploration": -1}, {"power": 0}, {"power": 11}, {"exploration": "much"}]
)
def test_fed_cbs_option_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Selector, "fed-cbs", options)
