"""The bandits against second implementations, over several rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pytest
from support.plain_loops import limited
from support.populations import context, played, population

from potluck.common.settings.plugins import create
from potluck.server.selection import Answers, Ask, RoundOutcome, Selection, Selector
from potluck.server.state import State


class PlainMemory:
    """Contexts and rewards of FLASH in plain loops. losses: first and last robust and validation
    losses of each client. waiting: contexts of the last cohort, as far as its updates arrived.
    known: all durations and rewards, for their running means."""

    def __init__(self, *, signed: bool) -> None:
        self.signed = signed
        self.first, self.losses = dict[int, Sequence[float]](), dict[int, Sequence[float]]()
        self.seconds, self.changes = dict[int, float](), dict[int, float]()
        self.waiting = dict[int, list[float]]()
        self.known: tuple[list[float], list[float]] = ([], [])

    def durations(self) -> dict[int, float]:
        return {row: max(value, 1e-6) for row, value in limited(self.seconds, 10).items()}

    def rewards(self) -> dict[int, float]:
        """Return the last reward of each client, at most ten times the median."""
        sizes = limited({row: abs(change) for row, change in self.changes.items()}, 10)
        return {row: math.copysign(size, self.changes[row]) for row, size in sizes.items()}

    def means(self) -> list[float]:
        return [sum(known) / len(known) if sum(known) else 1.0 for known in self.known]

    def contexts(self) -> dict[int, list[float]]:
        ratios = [
            limited(
                {row: x[i] / max(self.first[row][i], 1e-6) for row, x in self.losses.items()}, 10
            )
            for i in (0, 1)
        ]
        durations, rewards, usual = self.durations(), self.rewards(), self.means()
        found = {}
        for row in self.losses:
            speed = durations.get(row, usual[0]) / usual[0]
            values = [ratios[0][row], ratios[1][row], speed, rewards.get(row, 0.0) / usual[1]]
            found[row] = [max(-100.0, min(100.0, value)) for value in values]
        return found

    def hear(self, answers: Mapping[int, Sequence[float]]) -> dict[int, tuple[list[float], float]]:
        """Store robust loss, validation loss and estimated duration (0: unknown) of clients.
        Return the context and the reward of each client whose awaited reward became known."""
        estimates = limited({row: answer[2] for row, answer in answers.items()}, 10)
        self.seconds = {row: told for row, told in estimates.items() if told} | self.seconds
        durations, usual = self.durations(), self.means()[0]
        valid = {row: told for row, told in answers.items() if min(told[:2]) >= 0}
        fresh = sorted(set(valid) & set(self.losses))
        for row in fresh:
            fall = (self.losses[row][0] - valid[row][0]) / durations.get(row, usual)
            self.changes[row] = fall if self.signed else abs(fall)
        self.first, self.losses = valid | self.first, self.losses | valid
        self.known[0].extend(durations[row] for row in valid if row in durations)
        rewards = self.rewards()
        self.known[1].extend(abs(rewards[row]) for row in fresh)
        due = [row for row in fresh if row in self.waiting]
        scaled = {row: rewards[row] / self.means()[1] for row in due}
        found = {row: (self.waiting[row], max(-100.0, min(100.0, scaled[row]))) for row in due}
        self.waiting = {}
        return found

    def train(self, came: Mapping[int, float], failed: Sequence[int]) -> None:
        """Store a round. came: duration of each client whose update arrived."""
        self.waiting = {row: x for row, x in self.contexts().items() if row in came}
        self.seconds |= {**came, **dict.fromkeys(failed, 600.0)}


class PlainBandit(Protocol):
    """A second implementation of a bandit."""

    def learn(self, number: int, found: Mapping[int, tuple[list[float], float]]) -> None:
        """Learn the rewards that became known in a round."""

    def fail(self, number: int, rows: Sequence[int]) -> None:
        """Store which selected clients sent no update."""

    def score(self, number: int, row: int, x: Sequence[float]) -> tuple[float, float]:
        """Return the expected reward and the bonus of a client with this context."""
        ...


class PlainRestless:
    """Restless bandit in plain loops, which keeps all events with their rounds. tries: round,
    client, state and reward; the state of a failed try is None. steps: round and both states."""

    def __init__(self, states: int, discount: float) -> None:
        self.states, self.discount = states, discount
        self.tries: list[tuple[int, int, int | None, float]] = []
        self.steps: list[tuple[int, int, int]] = []
        self.means: list[float] = []
        self.last = 0

    def state_of(self, mean: float) -> int:
        """Return the number of quantiles of the earlier means that lie below this mean."""
        ordered, below = sorted(self.means), 0
        for border in range(1, self.states if ordered else 1):
            place = (len(ordered) - 1) * border / self.states
            low = min(int(place), max(len(ordered) - 2, 0))
            high = min(low + 1, len(ordered) - 1)
            below += ordered[low] + (ordered[high] - ordered[low]) * (place - low) < mean
        return below

    def learn(self, number: int, found: Mapping[int, tuple[list[float], float]]) -> None:
        if not found:
            return
        rewards = {row: reward for row, (_, reward) in found.items()}
        mean = sum(rewards.values()) / len(rewards)
        state = self.state_of(mean)
        self.tries += [(number - 1, row, state, reward) for row, reward in rewards.items()]
        if self.means:
            self.steps.append((number - 1, self.last, state))
        self.means.append(mean)
        self.last = state

    def fail(self, number: int, rows: Sequence[int]) -> None:
        self.tries += [(number, row, None, 0.0) for row in rows]

    def score(self, number: int, row: int, x: Sequence[float]) -> tuple[float, float]:
        aged = [
            (state, self.discount ** (number - then), reward)
            for then, client, state, reward in self.tries
            if client == row
        ]
        if not aged:
            return 0.0, math.inf
        failures = sum(age for state, age, _ in aged if state is None)
        followed = [
            1.0 + sum(self.discount ** (number - then) for then, a, b in self.steps if (a, b) == to)
            for to in ((self.last, state) for state in range(self.states))
        ]
        rewarded = [event for event in aged if event[0] is not None]
        expected = bonus = 0.0
        for state, chance in enumerate(followed):
            here = [event for event in rewarded if event[0] == state] or rewarded
            count = sum(age for _, age, _ in here)
            mean = sum(age * reward for _, age, reward in here) / count if here else 0.0
            share = chance / sum(followed)
            expected += share * mean
            bonus += share * math.sqrt(2 * math.log(number) / (count + failures))
        return expected, bonus


class PlainNeural:
    """NeuralUCB in plain loops. weights: of each unit for the context, its shift, and its weight in
    the output; then the output's shift. history: all contexts with their rewards."""

    def __init__(self, weights: Sequence[float], options: Mapping[str, Any]) -> None:
        self.weights, self.width = list(weights), options["width"]
        self.exploration, self.rate = options["exploration"], options["learning_rate"]
        self.adam_steps = options["steps"]
        self.design = options["regularization"] * np.eye(len(weights))
        self.history: list[tuple[list[float], float]] = []

    def network(self, x: Sequence[float]) -> tuple[float, list[float]]:
        """Return the prediction for a context, and its derivatives by the weights."""
        width, weights, size = self.width, self.weights, len(x)
        predicted, slopes = weights[-1], [0.0] * len(weights)
        slopes[-1] = 1.0
        for unit in range(width):
            inner = weights[size * unit : size * unit + size]
            hidden = sum(a * b for a, b in zip(inner, x, strict=True))
            hidden += weights[size * width + unit]
            outer = (size + 1) * width + unit
            if hidden > 0:
                predicted += weights[outer] * hidden
                slopes[outer] = hidden
                slopes[size * width + unit] = weights[outer]
                for place in range(size):
                    slopes[size * unit + place] = weights[outer] * x[place]
        return predicted, slopes

    def learn(self, number: int, found: Mapping[int, tuple[list[float], float]]) -> None:
        for x, _ in found.values():
            slopes = self.network(x)[1]
            self.design += np.outer(slopes, slopes) / self.width
        self.history += found.values()
        first, second = [0.0] * len(self.weights), [0.0] * len(self.weights)
        for step in range(1, 1 + self.adam_steps if found else 1):
            gradient = [0.0] * len(self.weights)  # of half the mean squared error
            for x, reward in self.history:
                predicted, slopes = self.network(x)
                for place, slope in enumerate(slopes):
                    gradient[place] += (predicted - reward) * slope / len(self.history)
            rate = self.rate * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            for place, slope in enumerate(gradient):
                first[place] = 0.9 * first[place] + 0.1 * slope
                second[place] = 0.999 * second[place] + 0.001 * slope**2
                self.weights[place] -= rate * first[place] / (math.sqrt(second[place]) + 1e-8)

    def fail(self, number: int, rows: Sequence[int]) -> None:
        """Ignore failures: there is no reward."""

    def score(self, number: int, row: int, x: Sequence[float]) -> tuple[float, float]:
        predicted, slopes = self.network(x)
        square = float(np.dot(slopes, np.linalg.solve(self.design, slopes))) / self.width
        return predicted, self.exploration * math.sqrt(square)


def compare(selector: Selector, plain: PlainBandit, *, signed: bool, seed: int) -> State:
    """Compare 20 rounds of both; return the last state.

    Some clients are unavailable, some answers are missing, invalid or far above the others, and
    some updates fail. Client 2 answers equally in each round. Clients 8 and 9 join in round 6.
    """
    generator, memory = np.random.default_rng(seed), PlainMemory(signed=signed)
    state, asked = selector.init(population(8)), list[list[int]]()

    def answering(ask: Ask) -> Answers:
        asked.append(ask.rows.tolist())
        rows = ask.rows[generator.random(len(ask.rows)) < 0.9]
        table = generator.uniform(0.5, 3, (3, len(rows))) * (1 + rows % 3)
        table *= generator.choice([-1, 0, 1, 100], table.shape, p=[0.03, 0.04, 0.9, 0.03])
        table[2] = np.where(rows % 3 == 0, 1 + rows % 2, 0)
        table[:, rows == 2] = [[2], [2], [0]]
        names = ("robust", "validation", "seconds")
        return Answers(rows=rows, values=dict(zip(names, table, strict=True)))

    for number in range(1, 21):
        clients = 10 if number >= 6 else 8
        here = np.flatnonzero(generator.random(clients) < 0.8)
        given = context(population(clients), 3, number=number, seed=seed, available=here)
        selection, answers = played(selector, state, given, answering)
        assert asked == [here.tolist()]
        asked.clear()
        told = np.stack([*answers[0].values.values()], axis=1).tolist()
        found = memory.hear(dict(zip(answers[0].rows.tolist(), told, strict=True)))
        plain.learn(number, found)
        scores = {
            row: plain.score(number, row, x)
            for row, x in sorted(memory.contexts().items())
            if row in here
        }
        twin, size = given.generator(type(selector).__name__), min(3, len(here))
        keys = dict(zip(scores, twin.random(len(scores)).tolist(), strict=True))
        best = sorted(scores, key=lambda row: (-round(sum(scores[row]), 12), keys[row]))[:size]
        rest = [row for row in here.tolist() if row not in best]
        more = twin.choice(np.array(rest, np.int64), size - len(best), replace=False).tolist()
        assert selection.rows.tolist() == best + more
        check_reasons(selection, [scores[row] for row in best])

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
        failed = selection.rows[~arrived].tolist()
        memory.train(came, failed)
        plain.fail(number, failed)
    return state


def check_reasons(selection: Selection, scores: Sequence[tuple[float, float]]) -> None:
    """Compare the numbers in the reasons, which have three digits, with these scores."""
    for reason, (expected, bonus) in zip(selection.reasons, scores, strict=False):
        if math.isinf(bonus):
            assert reason == "never tried (adapted)"
            continue
        words = reason.split()
        assert float(words[1]) == pytest.approx(expected, rel=6e-3, abs=1e-9)
        assert float(words[4]) == pytest.approx(bonus, rel=6e-3, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("reward", ["absolute", "signed"])
@pytest.mark.parametrize(("states", "discount"), [(1, 1.0), (2, 0.99), (3, 0.7)])
def test_rounds_of_the_restless_bandit_agree_with_a_second_implementation(
    states: int, discount: float, reward: str, seed: int
) -> None:
    options = {"states": states, "discount": discount, "reward": reward}
    plain = PlainRestless(states, discount)
    selector = create(Selector, "restless-bandit", options)
    compare(selector, plain, signed=reward == "signed", seed=seed)
    assert {state for _, _, state, _ in plain.tries} == {None, *range(states)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("reward", ["absolute", "signed"])
@pytest.mark.parametrize(
    ("width", "exploration", "regularization"), [(2, 0.1, 1.0), (5, 0.5, 0.3), (3, 5.0, 2.0)]
)
def test_rounds_of_the_neural_bandit_agree_with_a_second_implementation(
    width: int, exploration: float, regularization: float, reward: str, seed: int
) -> None:
    """Both begin with the same random weights."""
    options = {"width": width, "exploration": exploration, "regularization": regularization}
    options |= {"steps": 3, "learning_rate": 0.05}
    selector = create(Selector, "neural-bandit", {**options, "reward": reward})
    plain = PlainNeural(selector.init(population(8)).arrays["weights"].tolist(), options)
    state = compare(selector, plain, signed=reward == "signed", seed=seed)
    assert state.arrays["weights"] == pytest.approx(plain.weights, abs=1e-6)
    assert state.arrays["design"] == pytest.approx(plain.design, abs=1e-6)
    assert len(plain.history) > 15
