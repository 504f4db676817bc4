import numpy as np
import pytest
from support.populations import context, labelled, population, rounds, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Selector
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
