from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support.populations import context, outcome, played, population

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Answers, Ask, Floats, Selector
from potluck.server.selectors.bandits.context_bandit import Lesson
from potluck.server.selectors.bandits.restless_bandit import (
    RestlessBandit,
    state_of,
    upper_bounds,
)


def lesson(rows: list[int], rewards: list[float]) -> Lesson:
    return Lesson(
        rows=np.array(rows, dtype=np.int64),
        contexts=np.ones((len(rows), 4)),
        rewards=np.array(rewards, dtype=np.float64),
    )


def test_restless_bandit_discounted_counts_equal_the_worked_example() -> None:
    """A worked example: rewards 1 in round 1 and 0 in round 3, seen in round 4 with discount .9."""
    bandit = RestlessBandit(states=1, discount=0.9)
    known = bandit.beginning()
    for due in (lesson([0], [1.0]), lesson([], []), lesson([0], [0.0])):
        known = bandit.learned(known, due, 1)
    assert known.arrays["counts"][0, 0] == pytest.approx(1.629)
    expected, bonus = bandit.scores(known, np.ones((1, 4)), np.array([0]), 4)
    assert expected[0] == pytest.approx(0.4475, abs=1e-4)
    assert bonus[0] == pytest.approx((2 * np.log(4) / 1.629) ** 0.5)


def test_restless_bandit_with_one_state_and_no_discount_equals_ucb1() -> None:
    generator = np.random.default_rng(0)
    bandit = RestlessBandit(states=1, discount=1.0)
    known, plays = bandit.beginning(), dict[int, list[float]]()
    for number in range(2, 40):
        rows = generator.choice(6, 2, replace=False).tolist()
        rewards = generator.random(2).tolist()
        known = bandit.learned(known, lesson(rows, rewards), 6)
        for row, reward in zip(rows, rewards, strict=True):
            plays.setdefault(row, []).append(reward)
        expected, bonus = bandit.scores(known, np.ones((6, 4)), np.arange(6), number)
        for row in range(6):
            if row not in plays:
                assert bonus[row] == np.inf
                continue
            assert expected[row] == pytest.approx(np.mean(plays[row]))
            assert bonus[row] == pytest.approx((2 * np.log(number) / len(plays[row])) ** 0.5)


def test_restless_bandit_states_are_quantiles_of_previous_rounds() -> None:
    before = np.array([1.0, 2.0, 3.0, 4.0])
    assert [state_of(mean, before, 2) for mean in (0.0, 2.5, 2.6, 9.0)] == [0, 0, 1, 1]
    assert [state_of(mean, before, 4) for mean in (1.0, 2.0, 3.0, 4.0)] == [0, 1, 2, 3]
    assert state_of(5.0, before[:0], 2) == 0


def test_unseen_state_takes_the_mean_reward_of_the_other_states() -> None:
    counts, sums = np.array([[2.0, 4.0], [3.0, 0.0]]), np.array([[2.0, 12.0], [6.0, 0.0]])
    expected, bonus = upper_bounds(counts, sums, np.zeros(2), np.array([0.25, 0.75]), 7)
    assert expected.tolist() == pytest.approx([0.25 * 1 + 0.75 * 3, 2.0])
    width = np.sqrt(2 * np.log(7))
    assert bonus[0] == pytest.approx(width * (0.25 / 2**0.5 + 0.75 / 2))
    assert bonus[1] == pytest.approx(width / 3**0.5)


def answers_of(losses: Floats, ask: Ask) -> Answers:
    told = losses[ask.rows]
    return Answers(
        rows=ask.rows, values={"robust": told, "validation": told, "seconds": np.zeros(len(told))}
    )


def test_restless_bandit_tries_every_client_and_then_selects_the_best_more_often() -> None:
    """The loss of client 0 halves in every round it trains in, that of the others hardly moves."""
    given, selector = population(4), RestlessBandit(states=1)
    state, losses, picks = selector.init(given), np.full(4, 1e9), Counter[int]()
    for number in range(1, 41):
        selection, answers = played(
            selector,
            state,
            context(given, 1, number=number),
            partial(answers_of, losses),
        )
        [row] = selection.rows.tolist()
        picks[row] += 1
        losses = losses.copy()
        losses[row] *= 0.5 if row == 0 else 0.999
        if number <= 4:
            assert selection.reasons == ("never tried (adapted)",)
        else:
            assert "(adapted)" in selection.reasons[0]
        state = selector.observe(state, outcome(number, selection, answers))
    assert set(picks) == {0, 1, 2, 3}
    assert picks[0] > 13


def test_restless_bandit_stops_preferring_a_client_that_always_fails() -> None:
    given, selector = population(3), RestlessBandit()
    state, picks = selector.init(given), Counter[int]()
    for number in range(1, 31):
        selection, answers = played(selector, state, context(given, 1, number=number))
        picks.update(selection.rows.tolist())
        ended = outcome(number, selection, answers)
        if 0 in selection.rows:
            ended = replace(ended, included=selection.rows[:0])
        state = selector.observe(state, ended)
    assert 1 <= picks[0] <= 12


@pytest.mark.parametrize("options", [{"states": 0}, {"discount": 0}, {"reward": "large"}])
def test_restless_bandit_option_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Selector, "restless-bandit", options)
