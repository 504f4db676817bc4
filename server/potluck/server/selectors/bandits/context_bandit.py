"""Base class of bandits that use the contexts and rewards of `flash`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import NonNegativeFloat

from potluck.server.selection import (
    Answers,
    Ask,
    Floats,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.selectors.parts.choosing import TIE_DECIMALS, Cohort
from potluck.server.selectors.parts.flash_memory import Memory, Rules
from potluck.server.state import State

LARGEST = 100.0
"""Maximum absolute value of contexts and rewards; larger ones are limited to it. Usual values are
about 1."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Rewards of the previous round, which became known with the answers to a question.

    rows: n, rows of the clients whose updates were included in the previous round. contexts: n × 4,
    the contexts by which these clients were selected. rewards: n.
    """

    rows: Rows
    contexts: Floats
    rewards: Floats


@dataclass(frozen=True, kw_only=True)
class ContextBandit(Selector):
    """Selects the clients with the largest scores; clients that never reported losses come last.

    alpha, beta: weights in the robust loss. reward: `absolute` change of that loss, or `signed`:
    the amount by which the loss fell. The reward is per second of training; change and duration are
    divided by their running means, as in `flash`.
    """

    alpha: NonNegativeFloat = 1.0
    beta: NonNegativeFloat = 1.0
    reward: Literal["absolute", "signed"] = "absolute"

    asks_questions = frozenset({"context"})
    training: ClassVar[Mapping[str, object]] = {"validation_share": 0.1}

    # What a bandit is made of -----------------------------------------------------------------

    @abstractmethod
    def beginning(self) -> State:
        """Return the bandit's state before the first reward, without rows for clients."""

    @abstractmethod
    def learned(self, known: State, lesson: Lesson, clients: int) -> State:
        """Return the state, updated with the rewards of a lesson."""

    @abstractmethod
    def scores(
        self, known: State, contexts: Floats, rows: Rows, number: int
    ) -> tuple[Floats, Floats]:
        """Return the expected reward and the exploration bonus of the clients in `rows`.

        The bonus is infinite for clients that were never tried. contexts: K × 4. number: number of
        the round.
        """

    def failed(self, known: State, rows: Rows, clients: int) -> State:
        """Return the state after a round in which these selected clients sent no update."""
        return known

    # The seam ---------------------------------------------------------------------------------

    def init(self, population: Population) -> State:
        """Return a state without rewards."""
        return self._together(Memory.empty(len(population), 1.0), self.beginning())

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """Return the `count` clients with the largest scores; first ask for contexts."""
        generator = context.generator(type(self).__name__)
        cohort = Cohort(context, generator)
        if not cohort.size:
            return cohort.selection()
        clients = len(context.population)
        answers = yield Ask(
            rows=context.available,
            kind="context",
            parameters={"alpha": self.alpha, "beta": self.beta},
            names=("robust", "validation", "seconds"),
        )
        memory, known = self._heard(Memory.of(state, clients), state, answers, context.round)
        rows = context.available[memory.last_heard[context.available] > 0]
        expected, bonus = self.scores(known, self._contexts(memory), rows, context.round)
        keys = np.round(-(expected + bonus), TIE_DECIMALS)
        best = np.lexsort((generator.random(len(rows)), keys))[: cohort.size]
        cohort.extend(
            rows[best].tolist(),
            [_reason(float(expected[each]), float(bonus[each])) for each in best],
        )
        cohort.draw(cohort.missing, "has never told its losses; drawn uniformly")
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Learn the rewards of the previous round, and store the durations of this round."""
        rows = [outcome.cohort, *(answers.rows for answers in outcome.answers)]
        memory = Memory.of(state, 1 + max(int(each.max(initial=-1)) for each in rows))
        known = self._own(state)
        for answers in outcome.answers:
            memory, known = self._heard(memory, state, answers, outcome.round)
        # also clients that over-selection made unnecessary: an infinite bonus would never end
        lost = np.setdiff1d(outcome.cohort, outcome.included)
        known = self.failed(known, lost, len(memory.seconds))
        return self._together(memory.trained(outcome, self._rules), known)

    @property
    def _rules(self) -> Rules:
        return Rules(standardised=True, signed=self.reward == "signed")

    def _heard(
        self, before: Memory, state: State, answers: Answers, number: int
    ) -> tuple[Memory, State]:
        memory = before.heard(answers, number, self._rules)
        rows, rewards = memory.settled(before, self._rules)
        lesson = Lesson(
            rows=rows,
            contexts=np.clip(before.credited[rows], -LARGEST, LARGEST),
            rewards=np.clip(rewards, -LARGEST, LARGEST),
        )
        return memory, self.learned(self._own(state), lesson, len(memory.seconds))

    def _contexts(self, memory: Memory) -> Floats:
        return np.clip(memory.contexts(self._rules), -LARGEST, LARGEST)

    def _own(self, state: State) -> State:
        names = self.beginning().arrays
        return State(scalars=state.scalars, arrays={name: state.arrays[name] for name in names})

    def _together(self, memory: Memory, known: State) -> State:
        return State(scalars=known.scalars, arrays={**memory.state().arrays, **known.arrays})


def _reason(expected: float, bonus: float) -> str:
    if np.isinf(bonus):
        return "never tried (adapted)"
    return f"reward {expected:.3g} expected, and {bonus:.3g} for what is not known (adapted)"
