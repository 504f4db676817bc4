import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from support.plain_loops import limited
from support.populations import context, outcome, played, population, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Answers, Ask, RoundOutcome, Selection, Selector
from potluck.server.selectors.flash import Flash
from potluck.server.selectors.parts.flash_memory import Memory, Posterior, Rules, exploration_width
from potluck.server.state import State

STANDARDISED = Rules(standardised=True, signed=False)
RAW = Rules(standardised=False, signed=False)


def told(
    robust: ArrayLike, validation: ArrayLike | None = None, seconds: ArrayLike | None = None
) -> Answers:
    """Return answers in which client k has the k-th value of each argument."""
    robust = np.array(robust, dtype=np.float64)
    values = {
        "robust": robust,
        "validation": robust if validation is None else np.array(validation, dtype=np.float64),
    }
    if seconds is not None:
        values["seconds"] = np.array(seconds, dtype=np.float64)
    return Answers(rows=np.arange(len(robust)), values=values)


def of(rows: list[int]) -> Selection:
    return Selection(rows=np.array(rows, dtype=np.int64), reasons=["because"] * len(rows))


# The bandit ------------------------------------------------------------------------------------


def test_flash_posterior_equals_the_worked_example() -> None:
    """A worked example."""
    contexts = np.array([[1.0, 0.5], [0.0, 1.0]])
    posterior = Posterior.prior(2, 1.0).given(contexts, np.array([0.4, 0.2]))
    assert posterior.precision.tolist() == [[2.0, 0.5], [0.5, 2.25]]
    assert posterior.response.tolist() == [0.4, 0.4]
    estimate = posterior.estimate()
    assert estimate == pytest.approx([0.16471, 0.14118], abs=1e-5)
    assert contexts @ estimate == pytest.approx([0.23529, 0.14118], abs=1e-5)
    offset = posterior.sample(1.0, np.array([1.0, -1.0])) - estimate
    assert offset == pytest.approx([0.878605, -0.685994], abs=1e-6)


@pytest.mark.parametrize(("number", "width"), [(0, 4.4616), (1, 6.2641), (100, 7.7862)])
def test_exploration_width_equals_the_formula_of_the_paper(number: int, width: float) -> None:
    found = exploration_width(number, 50, dimension=4, regularization=1.0, delta=0.05)
    assert found == pytest.approx(width, abs=5e-5)


def test_posterior_samples_have_the_inverse_precision_as_covariance() -> None:
    generator = np.random.default_rng(0)
    contexts = generator.normal(size=(30, 3)) * [1.0, 5.0, 0.2]
    posterior = Posterior.prior(3, 1.0).given(contexts, np.ones(30))
    normals = generator.standard_normal((20_000, 3))
    drawn = np.array([posterior.sample(2.0, normal) for normal in normals])
    expected = 4.0 * np.linalg.inv(posterior.precision)
    assert np.cov(drawn.T) == pytest.approx(expected, rel=0.1, abs=0.02)
    assert drawn.mean(axis=0) == pytest.approx(posterior.estimate(), abs=0.05)


@given(scale=st.floats(1e-9, 1e9), seed=st.integers(0, 1000))
def test_posterior_samples_are_finite_for_contexts_of_any_scale(scale: float, seed: int) -> None:
    """Raw durations make the precision matrix ill-conditioned, but samples stay finite."""
    generator = np.random.default_rng(seed)
    contexts = generator.random((50, 4)) * [1.0, 1.0, scale, 1.0]
    contexts[:, 2] = scale  # feature 2 is the same in all contexts
    posterior = Posterior.prior(4, 1.0).given(contexts, generator.random(50))
    assert np.isfinite(posterior.sample(5.0, generator.standard_normal(4))).all()


def test_contexts_divided_by_their_means_give_a_well_conditioned_precision() -> None:
    """500 contexts with durations around 11,000 s and rewards around 1e-5."""
    generator = np.random.default_rng(0)
    raw = generator.uniform(0.5, 1.5, (500, 4)) * [1.0, 1.0, 11_000.0, 1e-5]
    conditions = [
        np.linalg.cond(Posterior.prior(4, 1.0).given(contexts, np.zeros(500)).precision)
        for contexts in (raw, raw / raw.mean(axis=0))
    ]
    assert conditions[0] > 1e10
    assert conditions[1] < 100


# Contexts and rewards ---------------------------------------------------------------------------


def test_flash_contexts_are_losses_relative_to_the_first_losses() -> None:
    memory = Memory.empty(2, 1.0).heard(told([2.0, 4.0], [1.0, 3.0], [10.0, 30.0]), 1, RAW)
    assert memory.contexts(RAW).tolist() == [[1, 1, 10, 0], [1, 1, 30, 0]]
    memory = memory.heard(told([1.0, 5.0], [0.5, 3.0], [99.0, 99.0]), 2, RAW)
    assert memory.contexts(RAW)[:, :3].tolist() == [[0.5, 0.5, 10], [1.25, 1, 30]]
    assert memory.contexts(RAW)[:, 3] == pytest.approx([0.1, 1 / 30])
    standardised = memory.contexts(STANDARDISED)
    assert standardised[:, 2].tolist() == [0.5, 1.5]
    assert standardised[:, 3] == pytest.approx([1.5, 0.5])


def test_reward_is_credited_one_round_later_to_the_context_of_the_selection() -> None:
    """S_1 = {0}: its reward is L(w_2) − L(w_1) over the duration of round 1."""
    first, second = told([2.0, 4.0], None, [10.0, 20.0]), told([1.5, 3.0])
    memory = Memory.empty(2, 1.0).heard(first, 1, RAW)
    ended = replace(outcome(1, of([0])), seconds=np.array([5.0]))
    trained = memory.trained(ended, RAW)
    assert trained.response.tolist() == [0, 0, 0, 0]
    credited = trained.heard(second, 2, RAW)
    reward = 0.5 / 5.0
    assert credited.response == pytest.approx(reward * np.array([1, 1, 10, 0]))
    assert credited.precision == pytest.approx(np.eye(4) + np.outer([1, 1, 10, 0], [1, 1, 10, 0]))
    assert not credited.awaiting.any()
    again = credited.heard(told([1.0, 1.0]), 3, RAW)
    assert again.response.tolist() == credited.response.tolist()


def test_literal_crediting_uses_the_loss_change_before_the_cohort_trained() -> None:
    """S_2 = {0}: its reward is L(w_2) − L(w_1), its context has the reward before that."""
    rules = replace(RAW, literal=True)
    memory = Memory.empty(2, 1.0).heard(told([2.0, 4.0], None, [10.0, 20.0]), 1, rules)
    first = memory.trained(replace(outcome(1, of([1])), seconds=np.array([20.0])), rules)
    assert first.response.tolist() == [0, 0, 0, 0], "there is no change before the first question"
    second = first.heard(told([1.0, 4.0]), 2, rules)
    assert second.response.tolist() == [0, 0, 0, 0]
    assert second.contexts(rules)[0] == pytest.approx([0.5, 0.5, 10, 0])
    assert second.contexts(RAW)[0, 3] == pytest.approx(0.1)
    ended = second.trained(replace(outcome(2, of([0])), seconds=np.array([10.0])), rules)
    assert ended.response == pytest.approx(0.1 * np.array([0.5, 0.5, 10, 0]))
    third = ended.heard(told([0.5, 4.0]), 3, rules)
    assert third.response.tolist() == ended.response.tolist(), "nothing is credited twice"
    assert third.contexts(rules)[0, 3] == pytest.approx(0.1)


def test_rewards_are_not_credited_again_in_rounds_without_a_question() -> None:
    """With refresh = "selected", only clients that have trained since their last answer are
    asked."""
    flash = Flash(crediting="literal", refresh="selected", scale="raw")
    federation = population(4)
    state = flash.init(federation)
    responses, asked = list[list[float]](), list[int]()

    def answered(ask: Ask) -> Answers:
        losses = np.full(len(ask.rows), 4.0 - len(asked))
        told = {"robust": losses, "validation": losses, "seconds": np.ones(len(losses))}
        return Answers(rows=ask.rows, values=told)

    available = first = np.arange(4)
    for number in range(1, 5):
        given = context(federation, 2, number=number, available=available)
        selection, answers = played(flash, state, given, answered)
        state = flash.observe(state, outcome(number, selection, answers))
        responses.append(state.arrays["response"].tolist())
        asked.append(len(answers))
        first = np.sort(selection.rows) if number == 1 else first
        available = np.setdiff1d(np.arange(4), first) if number == 2 else first
    assert asked == [1, 1, 0, 0]
    assert responses[1] == responses[2] == responses[3] != responses[0]


def test_flash_without_a_feature_equals_a_bandit_over_the_other_features() -> None:
    """The feature's column is 0; the other weights are drawn as by a bandit without it."""
    rules = replace(RAW, dropped=frozenset({"seconds"}))
    generator, others = np.random.default_rng(0), [0, 1, 3]
    contexts, rewards = generator.random((30, 4)), generator.random(30)
    contexts[:, 2] = 0.0
    whole = Posterior.prior(4, 1.0).given(contexts, rewards)
    smaller = Posterior.prior(3, 1.0).given(contexts[:, others], rewards)
    normal = generator.standard_normal(4)
    drawn = whole.sample(2.0, normal)[others]
    assert drawn == pytest.approx(smaller.sample(2.0, normal[others]), rel=1e-9)
    memory = Memory.empty(2, 1.0).heard(told([2.0, 4.0], None, [10.0, 30.0]), 1, rules)
    assert memory.contexts(rules).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize("first", [0.0, 5e-324, 1e308])
@pytest.mark.parametrize("second", [0.0, 5e-324, 1e308])
def test_flash_stays_finite_for_losses_of_any_size(first: float, second: float) -> None:
    """The smallest and the largest doubles, and nothing overflows between them."""
    memory = Memory.empty(2, 1.0).heard(told([first, 1.0], [first, 1.0], [0.0, 1.0]), 1, RAW)
    ended = replace(outcome(1, of([0, 1])), seconds=np.array([5e-324, 1.0]))
    memory = memory.trained(ended, RAW).heard(told([second, 1.0], [second, 1.0]), 2, RAW)
    assert np.isfinite(memory.contexts(RAW)).all()
    assert np.isfinite(memory.rewards).all()
    assert np.isfinite(memory.response).all()


def test_flash_rewards_are_absolute_unless_signed() -> None:
    """Client 0 gets better by 1, client 1 worse by 1."""
    rewards = {}
    for signed in (False, True):
        rules = replace(RAW, signed=signed)
        memory = Memory.empty(2, 1.0).heard(told([2.0, 2.0], None, [1.0, 1.0]), 1, rules)
        rewards[signed] = memory.heard(told([1.0, 3.0]), 2, rules).rewards.tolist()
    assert rewards == {False: [1.0, 1.0], True: [1.0, -1.0]}


def test_failed_client_gets_no_reward_and_the_deadline_as_its_duration() -> None:
    memory = Memory.empty(2, 1.0).heard(told([2.0, 2.0], None, [1.0, 1.0]), 1, RAW)
    ended = replace(
        outcome(1, of([0, 1])),
        included=np.array([1]),
        seconds=np.array([np.nan, 2.0]),
        deadline_seconds=7.0,
    )
    trained = memory.trained(ended, RAW)
    assert trained.seconds.tolist() == [7.0, 2.0]
    assert trained.awaiting.tolist() == [False, True]


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -np.inf, -1.0])
def test_client_without_valid_losses_keeps_its_context(nonsense: float) -> None:
    memory = Memory.empty(2, 1.0).heard(told([2.0, 2.0], None, [1.0, 1.0]), 1, RAW)
    memory = memory.trained(outcome(1, of([0, 1])), RAW)
    later = memory.heard(told([nonsense, 1.0]), 2, RAW)
    assert later.contexts(RAW)[0].tolist() == memory.contexts(RAW)[0].tolist()
    assert later.last_heard.tolist() == [1, 2]
    assert later.response == pytest.approx([1, 1, 1, 0])  # the reward of client 1 alone
    half = memory.heard(told([1.0, 1.0], [nonsense, 1.0]), 2, RAW)
    assert half.contexts(RAW)[0].tolist() == memory.contexts(RAW)[0].tolist()


@pytest.mark.parametrize("seconds", [np.inf, np.nan, -5.0, 0.0])
def test_invalid_durations_are_treated_as_unknown(seconds: float) -> None:
    memory = Memory.empty(2, 1.0).heard(told([2.0, 2.0], None, [seconds, 4.0]), 1, RAW)
    ended = replace(outcome(1, of([0])), seconds=np.array([seconds]))
    contexts = memory.trained(ended, RAW).heard(told([1.0, 1.0]), 2, RAW).contexts(STANDARDISED)
    assert np.isfinite(contexts).all()


def test_false_loss_of_one_client_hardly_changes_the_contexts_of_the_others() -> None:
    honest = np.linspace(1.0, 2.0, 19)
    contexts = {}
    for name, lie in (("true", 1.5), ("lie", 1e300)):
        memory = Memory.empty(20, 1.0).heard(told(np.append(honest, 1.5)), 1, STANDARDISED)
        memory = memory.heard(told(np.append(honest * 0.9, lie)), 2, STANDARDISED)
        contexts[name] = memory.contexts(STANDARDISED)
    assert contexts["lie"].max() <= 25
    ratio = contexts["lie"][:19] / contexts["true"][:19]
    assert ((ratio > 0.5) & (ratio <= 1.0)).all()


# The selector -----------------------------------------------------------------------------------


def test_flash_asks_all_clients_or_only_the_last_cohort_for_losses() -> None:
    federation = population(6)
    for selector, expected in (
        (Flash(refresh="all"), [0, 1, 2, 3, 4, 5]),
        (Flash(refresh="selected"), []),
    ):
        state = selector.init(federation)
        selection, answers = played(selector, state, context(federation, 2))
        assert answers[0].rows.tolist() == list(range(6))
        state = selector.observe(state, outcome(1, selection, answers))
        ask = next(selector.select(state, context(federation, 2, number=2)))
        assert ask.kind == "context"
        assert ask.parameters == {"alpha": 1.0, "beta": 1.0}
        assert ask.rows.tolist() == (expected or sorted(selection.rows.tolist()))


def test_flash_can_select_every_client_in_the_first_round() -> None:
    """As in the paper: then every client has a reward when the second cohort is chosen."""
    federation, selector = population(6), Flash(start="everybody")
    assert [selector.everybody(number) for number in (1, 2)] == [True, False]
    assert not Flash().everybody(1)
    state = selector.init(federation)
    selection, answers = played(selector, state, context(federation, 6))
    state = selector.observe(state, outcome(1, selection, answers))
    assert state.arrays["awaiting"].all()
    later, answers = played(selector, state, context(federation, 2, number=2))
    assert len(later.rows) == 2
    state = selector.observe(state, outcome(2, later, answers))
    assert state.arrays["precision"][0, 0] == 1.0 + 6


def cohorts(selector: Selector, number_of_rounds: int) -> list[list[int]]:
    """Return cohorts of five of 30 clients, whose losses fall at different paces."""
    federation, chosen = population(30), []
    state, paces = selector.init(federation), np.linspace(0.8, 0.99, 30)
    for number in range(1, number_of_rounds + 1):

        def answering(ask: Ask, number: int = number) -> Answers:
            return told(2.0 * paces**number, None, 1.0 + np.arange(30) % 4)

        selection, answers = played(
            selector, state, context(federation, 5, number=number), answering
        )
        chosen.append(selection.rows.tolist())
        state = selector.observe(state, outcome(number, selection, answers))
    return chosen


def test_each_flash_option_changes_the_selected_cohorts() -> None:
    options: list[dict[str, object]] = [
        {},
        {"crediting": "literal"},
        {"without": ["reward"]},
        {"without": ["robust", "validation", "seconds"]},
    ]
    chosen = [cohorts(create(Selector, "flash", each), 8) for each in options]
    assert all(a != b for i, a in enumerate(chosen) for b in chosen[:i])


def test_flash_asks_no_client_if_the_last_cohort_is_disconnected() -> None:
    """With `refresh = selected`, only the last cohort would be asked, and it is away."""
    federation, selector = population(4), Flash(refresh="selected")
    state = selector.init(federation)
    selection, answers = played(selector, state, context(federation, 2))
    state = selector.observe(state, outcome(1, selection, answers))
    others = np.setdiff1d(np.arange(4), selection.rows)
    away = context(federation, 2, number=2, available=others)
    later, answers = played(selector, state, away)
    assert not answers
    assert sorted(later.rows.tolist()) == others.tolist()
    selector.observe(state, outcome(2, later))


def test_flash_selects_clients_without_known_losses_last() -> None:
    federation, selector = population(5), Flash()

    def answering(ask: Ask) -> Answers:
        return told(np.ones(2))

    selection = select(selector, selector.init(federation), context(federation, 3), answering)
    assert set(selection.rows[:2].tolist()) == {0, 1}
    assert "never told" in selection.reasons[2]


def test_flash_reasons_name_the_round_of_an_old_context() -> None:
    federation, selector = population(2), Flash()
    state = selector.init(federation)
    selection, answers = played(selector, state, context(federation, 2))
    assert all("round 1" not in reason for reason in selection.reasons)
    state = selector.observe(state, outcome(1, selection, answers))

    def no_answers(ask: Ask) -> Answers:
        return Answers(rows=ask.rows[:0], values={})

    later = select(selector, state, context(federation, 2, number=2), no_answers)
    assert all("told in round 1" in reason for reason in later.reasons)


def test_flash_selects_clients_with_larger_rewards_more_often() -> None:
    """Half of the clients are ten times as quick, and all losses fall as fast: the quick ones have
    ten times the reward. After 200 rounds they are most of the cohorts; uniform would give half."""
    federation, selector = population(40), Flash()
    quick = np.arange(40) < 20
    seconds = np.where(quick, 1.0, 10.0)
    noise = np.random.default_rng(3)
    state, losses, share = selector.init(federation), np.full(40, 3.0), []

    def answering(ask: Ask) -> Answers:
        return told(losses, None, seconds)

    for number in range(1, 201):
        given_context = context(federation, 8, number=number)
        selection, answers = played(selector, state, given_context, answering)
        share.append(quick[selection.rows].mean())
        ended = replace(outcome(number, selection, answers), seconds=seconds[selection.rows])
        state = selector.observe(state, ended)
        losses = losses * (0.995 + 0.001 * noise.standard_normal(40))
    assert np.mean(share[100:]) > 0.7


FEATURES = ("robust", "validation", "seconds", "reward")


class PlainFlash:
    """FLASH in plain loops. first, losses: first and last robust and validation losses. changes:
    the last two rewards. waiting: contexts of the last cohort. fresh: clients whose reward the last
    question gave. known: durations and rewards of which the running means are taken."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.signed, self.literal = "reward" in options, "crediting" in options
        self.raw, self.without = "scale" in options, options.get("without", ())
        self.first, self.losses = dict[int, Sequence[float]](), dict[int, Sequence[float]]()
        self.seconds, self.changes = dict[int, float](), dict[int, tuple[float, float]]()
        self.waiting, self.fresh = dict[int, list[float]](), set[int]()
        self.known: tuple[list[float], list[float]] = ([], [])
        self.precision, self.response = np.eye(4), np.zeros(4)

    def durations(self) -> dict[int, float]:
        return {row: max(value, 1e-6) for row, value in limited(self.seconds, 10).items()}

    def rewards(self, which: int) -> dict[int, float]:
        sizes = limited({row: abs(pair[which]) for row, pair in self.changes.items()}, 10)
        return {row: math.copysign(sizes[row], self.changes[row][which]) for row in sizes}

    def means(self) -> list[float]:
        return [sum(known) / len(known) if sum(known) else 1.0 for known in self.known]

    def contexts(self) -> dict[int, list[float]]:
        ratios, found = list[dict[int, float]](), dict[int, list[float]]()
        for i in (0, 1):
            ratio = {row: x[i] / max(self.first[row][i], 1e-6) for row, x in self.losses.items()}
            ratios.append(limited(ratio, 10))
        durations, rewards, usual = self.durations(), self.rewards(int(self.literal)), self.means()
        for row in self.losses:
            last = [durations.get(row, usual[0]), rewards.get(row, 0.0)]
            last = last if self.raw else [last[0] / usual[0], last[1] / usual[1]]
            named = zip(FEATURES, [ratios[0][row], ratios[1][row], *last], strict=True)
            found[row] = [0.0 if name in self.without else value for name, value in named]
        return found

    def hear(self, answers: Mapping[int, Sequence[float]]) -> None:
        """Store robust loss, validation loss and estimated duration (0: unknown) of clients."""
        estimates = limited({row: answer[2] for row, answer in answers.items()}, 10)
        self.seconds = {row: told for row, told in estimates.items() if told} | self.seconds
        durations, usual, self.fresh = self.durations(), self.means()[0], set()
        valid = {row: told for row, told in answers.items() if min(told[:2]) >= 0}
        for row in set(valid) & set(self.losses):
            fall = (self.losses[row][0] - valid[row][0]) / durations.get(row, usual)
            before = self.changes.get(row, (0.0, 0.0))[0]
            self.changes[row] = fall if self.signed else abs(fall), before
            self.fresh.add(row)
        self.first, self.losses = valid | self.first, self.losses | valid
        self.known[0].extend(durations[row] for row in valid if row in durations)
        rewards = self.rewards(0)
        self.known[1].extend(abs(rewards[row]) for row in self.fresh)
        self.credit({} if self.literal else self.waiting)
        self.waiting = {}

    def train(self, came: Mapping[int, float], failed: Sequence[int]) -> None:
        """Store a round. came: duration of each client whose update arrived."""
        self.waiting = {row: x for row, x in self.contexts().items() if row in came}
        self.seconds |= {**came, **dict.fromkeys(failed, 600.0)}
        self.credit(self.waiting if self.literal else {})

    def credit(self, contexts: Mapping[int, Sequence[float]]) -> None:
        rewards, scale = self.rewards(0), 1.0 if self.raw else self.means()[1]
        for row in set(contexts) & self.fresh:
            self.precision += np.outer(contexts[row], contexts[row])
            self.response += [rewards[row] / scale * value for value in contexts[row]]

    def coefficients(self, width: float, normal: Sequence[float]) -> list[float]:
        root = np.linalg.cholesky(self.precision)
        mean = np.linalg.solve(self.precision, self.response)
        found: list[float] = (mean + width * np.linalg.solve(root.T, normal)).tolist()
        return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": "raw", "reward": "signed"},
        {"refresh": "selected"},
        {"crediting": "literal", "without": ("validation",)},
        {"reward": "signed", "without": ("seconds", "reward")},
    ],
)
def test_rounds_agree_with_a_second_implementation(options: dict[str, Any], seed: int) -> None:
    """Some clients answer alike, some answers are missing, invalid or far above the others, and
    some updates fail. Clients 9 to 11 join in round 5. Only some know their speed beforehand."""
    generator, selector = np.random.default_rng(seed), create(Selector, "flash", options)
    plain, state, asked = PlainFlash(options), selector.init(population(9)), list[Ask]()

    def answering(ask: Ask) -> Answers:
        asked.append(ask)
        rows = ask.rows[generator.random(len(ask.rows)) < 0.9]
        table = generator.choice(
            [-1, 0, 0.5, 1, 1, 2, 100], (3, len(rows)), p=[0.05, 0.1, 0.2, 0.2, 0.2, 0.2, 0.05]
        )
        table[2] = np.where(rows % 3 == 0, 1 + rows % 2, 0)
        table[:, rows % 4 == 1] = [[3 / number], [2 / number], [0]]
        names = ("robust", "validation", "seconds")
        return Answers(rows=rows, values=dict(zip(names, table, strict=True)))

    for number in range(1, 11):
        clients = 12 if number >= 5 else 9
        here = np.flatnonzero(generator.random(clients) < 0.8)
        given_context = context(population(clients), 4, number=number, seed=seed, available=here)
        selection, answers = played(selector, state, given_context, answering)
        rows = here.tolist()
        if options.get("refresh") == "selected":
            rows = [row for row in rows if row not in plain.losses or row in plain.waiting]
        assert [ask.rows.tolist() for ask in asked] == ([rows] if rows else [])
        asked.clear()
        told = dict[int, Sequence[float]]()
        for each in answers:
            values = np.stack(list(each.values.values()), axis=1).tolist()
            told = dict(zip(each.rows.tolist(), values, strict=True))
        plain.hear(told)
        twin, size = given_context.generator("flash"), min(4, len(here))
        dimension = 4 - len(options.get("without", ()))
        width = 1 + math.sqrt(dimension * math.log((1 + (number - 1) * clients) / 0.05))
        drawn = plain.coefficients(width, twin.standard_normal(4).tolist())
        scores = {
            row: sum(a * b for a, b in zip(x, drawn, strict=True))
            for row, x in sorted(plain.contexts().items())
            if row in here
        }
        keys = dict(zip(scores, twin.random(len(scores)).tolist(), strict=True))
        best = sorted(scores, key=lambda row: (round(-scores[row], 12), keys[row]))[:size]
        rest = [row for row in here.tolist() if row not in best]
        assert selection.rows.tolist() == [
            *best,
            *twin.choice(rest, size - len(best), replace=False),
        ]
        reported = [float(reason.split()[1]) for reason in selection.reasons[: len(best)]]
        assert reported == pytest.approx([scores[row] for row in best], rel=6e-3, abs=1e-9)

        arrived = generator.random(size) < 0.8
        seconds = np.where(arrived, generator.choice([0.5, 1, 1, 2, 50], size), np.nan)
        ended = RoundOutcome(
            round=number,
            selected=selection.rows,
            included=selection.rows[arrived],
            seconds=seconds,
            answers=answers,
            deadline_seconds=600.0,
        )
        state = selector.observe(state, ended)
        came = dict(zip(selection.rows[arrived].tolist(), seconds[arrived].tolist(), strict=True))
        plain.train(came, selection.rows[~arrived].tolist())
        assert state.arrays["precision"] == pytest.approx(plain.precision)
        assert state.arrays["response"] == pytest.approx(plain.response)
    assert plain.precision[0][0] > 5


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": -1},
        {"beta": np.inf},
        {"regularization": 0},
        {"delta": 0},
        {"scale": "none"},
        {"reward": "squared"},
        {"refresh": "none"},
        {"start": "none"},
        {"crediting": "none"},
        {"without": ["colour"]},
        {"without": ["robust", "validation", "seconds", "reward"]},
    ],
)
def test_flash_option_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Selector, "flash", options)


def test_flash_state_consists_of_numeric_arrays() -> None:
    state: State = Flash().init(population(3))
    assert not state.scalars
    assert all(array.dtype != object for array in state.arrays.values())
