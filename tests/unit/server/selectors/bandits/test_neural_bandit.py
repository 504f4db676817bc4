import numpy as np
import pytest
from support.populations import context, outcome, played, population

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Selector
from potluck.server.selectors.bandits.context_bandit import Lesson
from potluck.server.selectors.bandits.neural_bandit import (
    NeuralBandit,
    design_root,
    network,
    uncertain,
    widths,
)


def test_exploration_bonus_of_a_linear_model_equals_linucb() -> None:
    """A worked example, with FLASH's contexts."""
    contexts = np.array([[1.0, 0.5], [0.0, 1.0]])
    design = np.eye(2) + contexts.T @ contexts
    assert widths(contexts, design_root(design)) == pytest.approx([0.72761, 0.68599], abs=1e-5)


def test_network_gradients_equal_finite_differences() -> None:
    generator = np.random.default_rng(0)
    bandit = NeuralBandit(width=5)
    weights = bandit.beginning().arrays["weights"] + 0.1 * generator.standard_normal(31)
    contexts = generator.standard_normal((7, 4))
    _, slopes = network(weights, contexts)
    for place in range(31):
        step = np.zeros(31)
        step[place] = 1e-6
        ahead, behind = network(weights + step, contexts)[0], network(weights - step, contexts)[0]
        assert slopes[:, place] == pytest.approx((ahead - behind) / 2e-6, abs=1e-6)


def test_neural_bandit_learns_the_reward_of_a_context_and_its_bonus_shrinks() -> None:
    """The reward is the first number of the context."""
    generator = np.random.default_rng(1)
    bandit = NeuralBandit()
    known = bandit.beginning()
    probe = np.array([[0.2, 1, 1, 1], [1.8, 1, 1, 1]])
    before = bandit.scores(known, probe, np.arange(2), 1)[1]
    for _ in range(30):
        contexts = generator.uniform(0, 2, (10, 4))
        lesson = Lesson(rows=np.arange(10), contexts=contexts, rewards=contexts[:, 0].copy())
        known = bandit.learned(known, lesson, 10)
    expected, after = bandit.scores(known, probe, np.arange(2), 31)
    assert expected == pytest.approx([0.2, 1.8], abs=0.25)
    assert (after < before / 3).all()


def test_neural_bandit_reasons_state_that_the_algorithm_is_adapted() -> None:
    given, selector = population(6), NeuralBandit()
    selection, answers = played(selector, selector.init(given), context(given, 2))
    assert all("(adapted)" in reason for reason in selection.reasons)
    state = selector.observe(selector.init(given), outcome(1, selection, answers))
    later, answers = played(selector, state, context(given, 2, number=2))
    state = selector.observe(state, outcome(2, later, answers))
    assert state.arrays["brought"].shape == (2,)


@pytest.mark.parametrize("options", [{"width": 0}, {"exploration": -1}, {"steps": 1001}])
def test_neural_bandit_option_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Selector, "neural-bandit", options)


@pytest.mark.parametrize("width", [1, 3, 32, 64, 65])
def test_widths_computed_once_per_set_of_active_units_equal_the_full_computation(
    width: int,
) -> None:
    """Compare with widths from the gradients; with 65 units, the selector uses these itself."""
    generator = np.random.default_rng(width)
    weights = generator.normal(size=6 * width + 1)
    contexts = generator.uniform(0.9, 1.1, (3000, 4)) * generator.choice([-1, 1], (3000, 4))
    _, some = network(weights, contexts[:50])
    root = design_root(np.eye(len(weights)) + some.T @ some)
    expected, slopes = network(weights, contexts)
    found, unknown = uncertain(weights, contexts, root)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(unknown, widths(slopes, root), rtol=1e-9, atol=1e-12)
