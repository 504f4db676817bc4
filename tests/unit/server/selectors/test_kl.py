import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from support.populations import context, labelled, population, rounds, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import RoundOutcome, Selector
from potluck.server.selectors.kl import KullbackLeibler, Walk

FIVE = [[50, 0, 0], [20, 20, 0], [0, 30, 10], [0, 0, 25], [5, 5, 5]]


def test_kl_walk_reaches_the_divergences_of_the_worked_example() -> None:
    """KL 1.0986, .5003, .1638, .0129, .0052; 140 of 170 samples count."""
    walk = Walk(np.array(FIVE, dtype=np.float64))
    divergences, used = [], 0.0
    while (found := walk.next()) is not None:
        divergences.append(walk.divergence)
        used += found.counted.sum()
    assert np.round(divergences, 4).tolist() == [1.0986, 0.5003, 0.1638, 0.0129, 0.0052]
    assert used == 140


def test_kl_selects_as_in_the_worked_example() -> None:
    selection = next(rounds(KullbackLeibler(), labelled(FIVE), 5, 1))
    assert selection.rows.tolist() == [0, 1, 2, 3, 4]
    assert selection.reasons == (
        "most samples",
        "largest with class 1, the scarcest",
        "largest with class 2, the scarcest",
        "largest with class 2, the scarcest",
        "largest with class 2, the scarcest",
    )


def test_kl_selects_the_same_cohort_in_every_round() -> None:
    generator = np.random.default_rng(0)
    counts = generator.integers(0, 40, (50, 6)) * (generator.random((50, 6)) < 0.4)
    federation = population(50, classes=6, label_counts=counts)
    selector = KullbackLeibler(theta=0)
    cohorts = {tuple(s.rows.tolist()) for s in rounds(selector, federation, 8, 20)}
    assert len(cohorts) == 1


def test_kl_stops_below_theta_and_fills_the_cohort_uniformly() -> None:
    selection = next(rounds(KullbackLeibler(theta=0.2), labelled(FIVE), 5, 1))
    assert selection.rows[:3].tolist() == [0, 1, 2]
    assert set(selection.reasons[3:]) == {"no scarce class to fill; drawn uniformly"}


def test_class_that_no_client_has_ends_the_kl_walk() -> None:
    federation = labelled([[9, 0, 0], [0, 8, 0], [7, 0, 0]])
    selection = next(rounds(KullbackLeibler(), federation, 3, 1))
    assert selection.rows[:2].tolist() == [0, 1]
    assert selection.reasons[2] == "no scarce class to fill; drawn uniformly"


def test_kl_walk_returns_to_clients_it_passed_over() -> None:
    """Class 1 is wanted first, so client 1 is passed over until the walk comes round."""
    walk = Walk(np.array([[40.0, 0, 0], [0, 0, 20], [0, 15, 1], [0, 0, 10], [0, 3, 0]]))
    order = []
    while (found := walk.next()) is not None:
        order.append(found.position)
    assert order == [0, 2, 3, 1, 4]


def test_kl_sets_class_quotas_only_with_truncate() -> None:
    selection = next(rounds(KullbackLeibler(truncate=True), labelled(FIVE), 5, 1))
    assert selection.quotas is not None
    assert selection.quotas[:2].tolist() == [[50, 0, 0], [0, 20, 0]]
    assert next(rounds(KullbackLeibler(), labelled(FIVE), 5, 1)).quotas is None


def test_kl_selects_only_available_clients() -> None:
    selector, federation = KullbackLeibler(), labelled(FIVE)
    given = context(federation, 2, available=np.array([2, 3, 4]))
    assert select(selector, selector.init(federation), given).rows.tolist() == [2, 4]


def test_kl_selects_clients_without_label_counts_last() -> None:
    counts = np.array([[np.nan] * 2, [5, 0], [0, 4]])
    selection = next(rounds(KullbackLeibler(), population(3, label_counts=counts), 3, 1))
    assert selection.rows.tolist() == [1, 2, 0]


@pytest.mark.parametrize("options", [{"theta": -1.0}, {"theta": float("nan")}, {"truncate": "x"}])
def test_kl_option_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(
        ConfigurationError, match=f"selector kl: option '{next(iter(options))}' is "
    ):
        create(Selector, "kl", options)


def plain_divergence(counted: Sequence[float]) -> float:
    """Return the Kullback–Leibler divergence from uniform, in nats."""
    shares = [number / sum(counted) for number in counted if number > 0]
    return sum(share * math.log(share * len(counted)) for share in shares)


def plain_walk(
    counts: Mapping[int, Sequence[float]], size: int, theta: float
) -> dict[int, list[float]]:
    """Return the accepted clients, in order, each with its counted samples per class. counts: label
    counts of clients with samples, none of them negative."""
    line = sorted(counts, key=lambda row: (-sum(counts[row]), row))
    accepted: dict[int, list[float]] = {}
    counted, most, place, idle = [0.0], math.inf, 0, 0
    while len(accepted) < size and idle < 2 * len(line):
        if accepted and plain_divergence(counted) < theta:
            break
        row = line[place % len(line)]
        place, idle = place + 1, idle + 1
        if not accepted:
            most, counted = max(counts[row]), [0.0] * len(counts[row])
        elif row in accepted or counts[row][counted.index(min(counted))] <= 0:
            continue
        room = [most - number for number in counted]
        accepted[row] = [min(pair) for pair in zip(room, counts[row], strict=True)]
        counted = [sum(pair) for pair in zip(counted, accepted[row], strict=True)]
        idle = 0
    return accepted


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("theta", [0.0, 0.02, 0.2])
def test_rounds_agree_with_a_second_implementation(theta: float, seed: int) -> None:
    """Clients 10 to 13 join in round 5. Clients 2 and 7 are equal, client 3 has no samples, client
    5 sent no counts, and noise has made counts of client 4 negative."""
    generator, selector = np.random.default_rng(seed), KullbackLeibler(theta=theta, truncate=True)
    counts = generator.integers(0, 6, (14, 4)) * (generator.random((14, 4)) < 0.5) * 1.0
    counts[7], counts[3], counts[5], counts[4, :2] = counts[2], 0, np.nan, -2
    state, kinds = selector.init(population(10)), Counter[str]()
    for number in range(1, 11):
        clients, size = (14 if number >= 5 else 10), int(generator.integers(2, 7))
        federation = population(clients, classes=4, label_counts=counts[:clients])
        here = np.flatnonzero(generator.random(clients) < 0.8)
        given = context(federation, size, number=number, seed=seed, available=here)
        selection = select(selector, state, given)
        labels = {row: [max(0.0, value) for value in counts[row].tolist()] for row in here.tolist()}
        labels = {row: values for row, values in labels.items() if row != 5 and sum(values) > 0}
        size = min(size, len(here))
        accepted = plain_walk(labels, size, theta)
        rest = [row for row in here.tolist() if row not in accepted]
        drawn = given.generator("kl").choice(rest, size - len(accepted), replace=False).tolist()
        assert selection.rows.tolist() == [*accepted, *drawn]
        assert selection.quotas is not None
        unlimited = [[math.inf] * 4] * len(drawn)
        assert selection.quotas.tolist() == [*accepted.values(), *unlimited]
        order = sorted(accepted, key=lambda row: (-sum(labels[row]), row))
        kinds["returned to an earlier client"] += list(accepted) != order
        kinds["filled"] += bool(drawn)
        kinds["accepted all"] += not drawn

        arrived = selection.rows[generator.random(size) < 0.5]
        seconds = np.where(np.isin(selection.rows, arrived), 1.0, np.nan)
        ended = RoundOutcome(
            round=number, selected=selection.rows, included=arrived, seconds=seconds
        )
        state = selector.observe(state, ended)
    assert kinds["filled"] >= 1
    assert kinds["accepted all"] >= 1 or theta == 0.2
    assert kinds["returned to an earlier client"] >= 1 or theta == 0.2
