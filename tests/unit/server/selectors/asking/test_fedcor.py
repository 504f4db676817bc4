from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import multivariate_normal
from support.populations import Respond, context, outcome, played, population

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Answers, Floats, Selection, Selector
from potluck.server.selectors.asking.fedcor import MOST_CLIENTS, FedCor
from potluck.server.selectors.parts.loss_correlation import (
    NOISE,
    beginning,
    chosen,
    fitted,
    weighted_mean,
)
from potluck.server.state import State

GENERATOR = np.random.default_rng


def answering(losses: Callable[[int], Floats]) -> Callable[[int], Respond]:
    """Return a function of the round, whose answers have `losses(round)[k]` for client k."""
    return lambda number: (
        lambda ask: Answers(rows=ask.rows, values={"loss": losses(number)[ask.rows]})
    )


def test_fedcor_selects_as_in_the_worked_example() -> None:
    """A worked example: gains .7778, .7667, .4627, so client 0; then .2016, .4185, so client 2."""
    sigma = np.array([[2, 1.2, 0.1], [1.2, 1, 0.1], [0.1, 0.1, 1.5]])
    points: Floats = np.linalg.cholesky(sigma - NOISE**2 * np.eye(3)).astype(np.float64)
    picks, gains = chosen(points, np.full(3, 1 / 3), np.ones(3), 2, GENERATOR(0))
    assert list(picks) == [0, 2]
    assert gains == pytest.approx([0.7778, 0.4185], abs=1e-4)
    for client, gain in enumerate([0.7778, 0.7667, 0.4627]):  # the others have discount 0
        picks, gains = chosen(points, np.full(3, 1 / 3), np.eye(3)[client], 1, GENERATOR(0))
        assert list(picks) == [client]
        assert gains == pytest.approx([gain], abs=1e-4)
    picks, gains = chosen(points, np.full(3, 1 / 3), np.array([1, 1, 0.1]), 2, GENERATOR(0))
    assert list(picks) == [0, 1]
    assert gains == pytest.approx([0.7778, 0.2016], abs=1e-4)


def plain(sigma: Floats, shares: Floats, discounts: Floats, count: int) -> list[int]:
    """Return the cohort computed from the whole covariance matrix, as in the paper."""
    sigma, picks = sigma.copy(), list[int]()
    for _ in range(count):
        gains = discounts * (shares @ sigma) / np.sqrt(np.maximum(np.diag(sigma), 1e-12))
        gains[picks] = -np.inf
        pick = int(gains.argmax())
        sigma -= np.outer(sigma[:, pick], sigma[pick]) / sigma[pick, pick]
        picks.append(pick)
    return picks


def test_fedcor_cohorts_equal_those_from_the_full_covariance_matrix() -> None:
    generator = GENERATOR(1)
    for _ in range(10):
        points = generator.standard_normal((30, 6))
        shares, discounts = generator.dirichlet(np.ones(30)), generator.uniform(0.5, 1, 30)
        sigma = points @ points.T + NOISE**2 * np.eye(30)
        picks, _ = chosen(points, shares, discounts, 12, generator)
        assert list(picks) == plain(sigma, shares, discounts, 12)


def likelihood(points: Floats, changes: Floats, weights: Floats) -> float:
    total = 0.0
    for change, weight in zip(changes, weights, strict=True):
        known = ~np.isnan(change)
        sigma = points[known] @ points[known].T + NOISE**2 * np.eye(known.sum())
        covariance: Any = sigma  # scipy's annotation allows only a number
        total += weight * multivariate_normal.logpdf(change[known], cov=covariance)
    return float(total)


def test_fitting_step_of_fedcor_increases_the_likelihood_computed_by_scipy() -> None:
    """Adam's first step has the sign of the gradient, here found from differences in each
    coordinate; some rounds lack a client."""
    generator = GENERATOR(2)
    points, weights = generator.standard_normal((5, 2)), np.array([0.5, 0.7, 1.0])
    changes = generator.standard_normal((3, 5))
    changes[1, 3] = np.nan
    moved = fitted(points, changes, weights, steps=1, learning_rate=1e-3)
    for row in range(5):
        for column in range(2):
            step = np.zeros((5, 2))
            step[row, column] = 1e-5
            slope = likelihood(points + step, changes, weights)
            slope -= likelihood(points - step, changes, weights)
            assert moved[row, column] - points[row, column] == pytest.approx(
                1e-3 * np.sign(slope), rel=1e-3
            )
    longer = fitted(points, changes, weights, steps=300, learning_rate=0.01)
    assert likelihood(longer, changes, weights) > likelihood(points, changes, weights)


def test_mean_loss_change_is_weighted_by_age_over_known_values() -> None:
    changes = np.array([[1.0, np.nan, np.nan], [3.0, 5.0, np.nan]])
    mean = weighted_mean(changes, np.array([0.5, 1.0]))
    assert mean.tolist() == pytest.approx([3.5 / 1.5, 5.0, 0.0])


def test_initial_embedding_of_a_client_is_independent_of_the_number_of_clients() -> None:
    assert np.array_equal(beginning(9, 4)[:5], beginning(5, 4))


def two_kinds(number: int) -> Floats:
    """Return losses of clients 0 to 8 that move together, as do those of 9 to 11, with noise."""
    generator = GENERATOR(100 + number)
    one, other = GENERATOR(number).standard_normal(2)
    return 30 + np.repeat([one, other], [9, 3]) + 0.1 * generator.standard_normal(12)


def through_rounds(selector: FedCor, rounds: int) -> list[tuple[list[int], list[str], int]]:
    """Play rounds; return each round's cohort, its reasons and the number of clients asked."""
    given, told = population(12), answering(two_kinds)
    state, found = selector.init(given), list[tuple[list[int], list[str], int]]()
    for number in range(1, rounds + 1):
        selection, answers = played(selector, state, context(given, 2, number=number), told(number))
        found.append(
            (selection.rows.tolist(), list(selection.reasons), sum(len(a.rows) for a in answers))
        )
        state = selector.observe(state, outcome(number, selection, answers))
    return found


def test_fedcor_requests_losses_in_warm_up_and_refresh_rounds() -> None:
    found = through_rounds(FedCor(warm_up=3, refresh=3, steps=50), 9)
    assert [asked for *_, asked in found] == [12, 12, 12, 12, 0, 12, 12, 0, 12]
    said = [reasons[0].split(":")[0] for _, reasons, _ in found]
    assert [each for each in said if not each.startswith("expected")] == ["warm-up"] * 3 + [
        "refresh"
    ] * 2
    assert said[5] == said[8] == "refresh"


def test_fedcor_cohort_has_one_client_of_each_correlated_group() -> None:
    """A second client of the same group adds no information."""
    found = through_rounds(FedCor(warm_up=12, refresh=50, discount=1.0), 13)
    rows, reasons, _ = found[-1]
    assert [row < 9 for row in rows] == [True, False]
    assert reasons[0].startswith("expected to move all losses by ")


def test_fedcor_discounts_selected_clients_until_the_next_refresh() -> None:
    selector, given, told = (
        FedCor(warm_up=1, refresh=2, steps=10),
        population(4),
        answering(lambda number: two_kinds(number)[:4]),
    )
    state = selector.init(given)
    discounts = list[list[float]]()
    for number in range(1, 5):
        selection, answers = played(selector, state, context(given, 1, number=number), told(number))
        state = selector.observe(state, outcome(number, selection, answers))
        discounts.append(sorted(state.arrays["discounts"].tolist()))
    assert discounts == [[1] * 4, [0.95, 1, 1, 1], [0.95, 1, 1, 1], [0.95, 1, 1, 1]]


def test_fedcor_selects_clients_without_known_losses_last() -> None:
    selector, given = FedCor(warm_up=2, steps=10), population(5)
    state = selector.init(given)

    def silent(number: int) -> Floats:
        return np.where(np.arange(5) == 2, np.nan, two_kinds(number)[:5])

    def in_round(number: int) -> tuple[Selection, list[Answers]]:
        return played(selector, state, context(given, 5, number=number), answering(silent)(number))

    for number in (1, 2):
        state = selector.observe(state, outcome(number, *in_round(number)))
    selection, _ = in_round(3)
    assert selection.rows[-1] == 2
    assert "no change of its loss is known" in selection.reasons[-1]


def test_fedcor_refuses_more_clients_than_its_maximum() -> None:
    given = population(MOST_CLIENTS + 1)
    choosing = FedCor().select(State(), context(given, 5))
    with pytest.raises(ConfigurationError, match=r"up to 10,000 clients, but this run has 10,001"):
        next(choosing)


@pytest.mark.parametrize(
    "options", [{"warm_up": 0}, {"refresh": 1}, {"memory": 0}, {"discount": 1.1}, {"steps": 0}]
)
def test_fedcor_option_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Selector, "fedcor", options)
