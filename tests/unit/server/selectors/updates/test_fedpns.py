"""FedPNS against vectors computed by hand and by plain numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.populations import context, facts, facts_of, judged, outcome, population, select

from potluck.server.selection import Judgement, MeasureMean, RoundOutcome, Selection
from potluck.server.selectors.updates.fedpns import FedPNS, leaving_out, lost_share, moved
from potluck.server.state import State

FOUR = np.array([(1, 0), (0.8, 0.6), (-1, 0.2), (0.9, -0.1)])


def flagging(chosen: Selection, row: int) -> RoundOutcome:
    """Return the outcome of round 1, in which the update of client `row` was flagged."""
    judgement = Judgement(set_aside={row: "x"}, values={"flagged": (chosen.rows == row) * 1.0})
    return replace(outcome(1, chosen, judgement=judgement), facts=facts(chosen.rows))


def plain(updates: np.ndarray) -> float:
    """Return E(S) by its definition."""
    mean = updates.mean(axis=0)
    return float(sum(update @ mean for update in updates))


def test_expected_inner_products_equal_the_worked_example() -> None:
    expected, without = leaving_out(FOUR @ FOUR.T)
    assert expected == pytest.approx(0.845, abs=5e-4)
    assert without == pytest.approx([0.327, 0.273, 2.513, 0.427], abs=5e-4)


def test_expected_inner_products_equal_their_definition_for_any_updates() -> None:
    updates = np.random.default_rng(3).normal(size=(9, 40))
    expected, without = leaving_out(updates @ updates.T)
    assert expected == pytest.approx(plain(updates))
    assert without == pytest.approx([plain(np.delete(updates, k, axis=0)) for k in range(9)])


def test_fedpns_excludes_the_update_that_opposes_the_others() -> None:
    judgement = judged(FedPNS(share=0.5, check=False), State(), facts_of(FOUR))
    assert list(judgement.set_aside) == [2]
    assert judgement.set_aside[2] == "without it the others pull 2.97 times as far"


def test_fedpns_exclusion_is_independent_of_the_update_scale() -> None:
    selector = FedPNS(share=0.5, check=False)
    for scale in (1e-150, 1e150):
        assert list(judged(selector, State(), facts_of(scale * FOUR)).set_aside) == [2]


def test_fedpns_excludes_no_more_updates_than_its_share_allows() -> None:
    updates = [(1.0, 0.0)] * 8 + [(-1.0, 0.1), (-1.0, -0.1)]
    allowed = {0.8: 2, 0.9: 1, 1.0: 0}
    for share, count in allowed.items():
        judgement = judged(FedPNS(share=share, check=False), State(), facts_of(updates))
        assert len(judgement.set_aside) == count
        assert set(judgement.set_aside) <= {8, 9}


def test_default_share_of_fedpns_keeps_five_of_six_updates() -> None:
    updates = [(1.0, 0.0)] * 4 + [(-1.0, 0.1), (-1.0, -0.1)]
    judgement = judged(FedPNS(check=False), State(), facts_of(updates))
    assert len(judgement.set_aside) == 1


def test_literal_rule_of_fedpns_excludes_all_updates_against_the_mean() -> None:
    updates = [(1.0, 0.0), (1.0, 0.1), (-0.2, 0.0), (-0.3, 0.1)]
    judgement = judged(FedPNS(rule="literal"), State(), facts_of(updates))
    assert list(judgement.set_aside) == [2, 3]


@pytest.mark.parametrize(("loss_without", "left_out"), [(0.9, [2]), (1.0, [2]), (1.1, [])])
def test_loss_check_keeps_an_update_without_which_the_loss_rises(
    loss_without: float, left_out: list[int]
) -> None:
    def measured(wanted: MeasureMean) -> float:
        assert wanted.weights is not None
        assert (wanted.weights == 1).all(), "the paper's mean is not weighted"
        return 1.0 if 2 in wanted.rows else loss_without

    selector = FedPNS(share=0.5)
    assert selector.measures
    assert not FedPNS(check=False).measures
    assert not FedPNS(rule="literal").measures
    judgement = judged(selector, State(), facts_of(FOUR), measured)
    assert list(judgement.set_aside) == left_out
    assert judgement.values["flagged"].tolist() == [0, 0, 1, 0], "flagged before the check"


def test_client_kept_by_the_loss_check_is_drawn_less_often() -> None:
    selector, federation = FedPNS(share=0.5), population(5)
    state = selector.init(federation)
    everyone = select(selector, state, context(federation, 4, available=np.arange(4)))
    given = facts_of(FOUR, rows=np.sort(everyone.rows))
    judgement = judged(selector, state, given, lambda wanted: -float(len(wanted.rows)))
    assert not judgement.set_aside, "the loss rises without it"
    ended = replace(outcome(1, everyone, judgement=judgement), facts=given)
    state = selector.observe(state, ended)
    assert state.arrays["flagged"].tolist() == [0, 0, 1, 0, 0]
    assert state.arrays["probability"] == pytest.approx([0.25, 0.25, 0, 0.25, 0.25])


def test_excluded_client_loses_probability_to_all_others() -> None:
    lost = lost_share(np.array([0.1]), alpha=2, beta=0.7)
    after = moved(np.full(5, 0.2), np.array([2]), lost)
    assert after == pytest.approx([0.232, 0.232, 0.072, 0.232, 0.232])


def test_client_that_is_always_excluded_is_drawn_only_if_no_others_are_available() -> None:
    selector, federation = FedPNS(), population(5)
    state = selector.init(federation)
    everyone = select(selector, state, context(federation, 5))
    state = selector.observe(state, flagging(everyone, 3))
    assert state.arrays["probability"] == pytest.approx([0.25, 0.25, 0.25, 0, 0.25])
    for seed in range(20):
        chosen = select(selector, state, context(federation, 4, number=2, seed=seed))
        assert 3 not in chosen.rows
    assert 3 in select(selector, state, context(federation, 5, number=2)).rows


def test_client_that_joins_later_has_the_mean_probability() -> None:
    selector = FedPNS()
    state = selector.init(population(4))
    first = select(selector, state, context(population(4), 4))
    state = selector.observe(state, flagging(first, 0))
    grown = select(selector, state, context(population(6), 6, number=2))
    state = selector.observe(state, outcome(2, grown))
    expected = np.array([0, 4 / 3, 4 / 3, 4 / 3, 1.5, 1.5]) / 6
    expected[1:4] = 1 / 3 * 4 / 6
    expected[4:] = 1 / 6
    assert state.arrays["probability"] == pytest.approx(expected)
    assert state.arrays["probability"].sum() == pytest.approx(1)
