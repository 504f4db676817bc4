"""FLASH: a bandit on each client's losses and speed.

"Federated Learning Across Simultaneous Heterogeneities" is about clients that have different data,
wrong labels and slow hardware at once. Before each round, clients report their losses under the
round's model. From these, and from the durations of their trainings, linear Thompson sampling
learns the expected change of a client's loss per second.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat

from potluck.server.selection import (
    Answers,
    Ask,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.selectors.parts.choosing import TIE_DECIMALS, Cohort
from potluck.server.selectors.parts.flash_memory import (
    FEATURES,
    Feature,
    Memory,
    Rules,
    exploration_width,
)
from potluck.server.state import State


@dataclass(frozen=True, kw_only=True)
class Flash(Selector):
    """Selects the clients whose loss a bandit expects to change most per second.

    The expected reward is computed from coefficients that are drawn in each round. A client's
    context has four numbers: its robust loss and its validation loss, each as a ratio to the first
    one reported; the duration of its last training; and the last change of its robust loss, per
    second. The reward of a round is that change, for each client whose update was included. It
    becomes known, and is credited, when clients answer the next question.

    alpha, beta: weights of the robust loss, CE(labels) + alpha · CE(own predictions) + beta ·
    reverse CE(labels). regularization, delta: λ and δ of the bandit. scale: `standardised` divides
    durations and changes by their running means, `raw` uses seconds and nats. reward: `absolute`,
    as in the paper, also rewards a rising loss; `signed` rewards only a falling one. refresh: which
    clients are asked: `all`, or those just `selected` and those that never answered. start: the
    clients that train in round 1: `count` of them, or `everybody`, as in the paper. crediting: a
    cohort is credited with the change that it caused (`delayed`), or with the change before it, as
    Algorithm 1 prints it (`literal`); its context then has the reward before that. without:
    features that the bandit does not use: up to three of robust, validation, seconds and reward.

    If a client reports no finite losses, its last context is used; a client that never reported any
    comes last. O(K).
    """

    alpha: NonNegativeFloat = 1.0
    beta: NonNegativeFloat = 1.0
    regularization: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    delta: Annotated[float, Field(ge=1e-12, le=1)] = 0.05
    scale: Literal["standardised", "raw"] = "standardised"
    reward: Literal["absolute", "signed"] = "absolute"
    refresh: Literal["all", "selected"] = "all"
    start: Literal["count", "everybody"] = "count"
    crediting: Literal["delayed", "literal"] = "delayed"
    without: tuple[Feature, ...] | None = None

    asks_questions = frozenset({"context"})
    training: ClassVar[Mapping[str, object]] = {"validation_share": 0.1}

    def __post_init__(self) -> None:
        if len(self._rules.dropped) == len(FEATURES):
            raise ValueError("option 'without' removes all features; list at most three features")

    @property
    def _rules(self) -> Rules:
        return Rules(
            standardised=self.scale == "standardised",
            signed=self.reward == "signed",
            literal=self.crediting == "literal",
            dropped=frozenset(self.without or ()),
        )

    def everybody(self, round_number: int) -> bool:
        """Return True in round 1 with `start = "everybody"`."""
        return round_number == 1 and self.start == "everybody"

    def init(self, population: Population) -> State:
        """Return a state in which nothing is known."""
        return Memory.empty(len(population), self.regularization).state()

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """Return the `count` clients with the largest x · θ̃, after asking for contexts."""
        generator = context.generator("flash")
        cohort = Cohort(context, generator)
        if not cohort.size:
            return cohort.selection()
        before = Memory.of(state, len(context.population))
        asked, memory = self._asked(before, context.available), before
        if len(asked):
            answers = yield Ask(
                rows=asked,
                kind="context",
                parameters={"alpha": self.alpha, "beta": self.beta},
                names=("robust", "validation", "seconds"),
            )
            memory = before.heard(answers, context.round, self._rules)
        known = context.available[memory.last_heard[context.available] > 0]
        width = exploration_width(
            context.round - 1,
            len(context.population),
            dimension=len(FEATURES) - len(self._rules.dropped),
            regularization=self.regularization,
            delta=self.delta,
        )
        coefficients = memory.posterior.sample(width, generator.standard_normal(len(FEATURES)))
        scores = memory.contexts(self._rules)[known] @ coefficients
        rank = np.lexsort((generator.random(len(known)), np.round(-scores, TIE_DECIMALS)))
        best = rank[: cohort.size]
        cohort.extend(
            known[best].tolist(),
            [
                _reason(score, int(memory.last_heard[row]), context.round)
                for row, score in zip(known[best], scores[best].tolist(), strict=True)
            ],
        )
        cohort.draw(cohort.missing, "has never told its losses; drawn uniformly")
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Credit the rewards of the previous round; store this round's durations, and which clients
        will get a reward."""
        rows = [outcome.selected, *(answers.rows for answers in outcome.answers)]
        highest = max(int(each.max(initial=-1)) for each in rows)
        memory = Memory.of(state, highest + 1).with_credited_rewards()
        for answers in outcome.answers:
            memory = memory.heard(answers, outcome.round, self._rules)
        return memory.trained(outcome, self._rules).state()

    def _asked(self, memory: Memory, available: Rows) -> Rows:
        if self.refresh == "all":
            return available
        due = (memory.last_heard == 0) | memory.awaiting
        asked: Rows = available[due[available]]
        return asked


def _reason(score: float, heard: int, round_number: int) -> str:
    told = "" if heard == round_number else f", by what it told in round {heard}"
    return f"reward {score:.3g} under this round's draw{told}"
