"""A selector and its question, with points at which a test may stop the coordinator or a host."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from potluck_crash_points import reach

from potluck.client.question import QuestionContext
from potluck.client.training.questions.loss import Loss
from potluck.server.selection import (
    Answers,
    Ask,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Signal,
)
from potluck.server.state import State


def note(name: str, text: str) -> None:
    """Add a line to a file in the folder of the points."""
    with (Path(os.environ["POTLUCK_POINTS"]) / name).open("a") as file:
        file.write(text + "\n")


@dataclass(frozen=True, kw_only=True)
class Watched(Loss):
    """The loss. Point: `question-CLIENT`. Each answer is a line of `answered-CLIENT`."""

    def answer(self, context: QuestionContext) -> Mapping[str, float]:
        """As Loss does."""
        reach(f"question-{context.client}")
        note(f"answered-{context.client}", str(context.round))
        return super().answer(context)


class Asking:
    """Selects clients with the largest losses: asks all, then the half with larger losses again.

    Points: `ask` before the first question, `answer-1` and `answer-2` after the answers. Each call
    of `observe` adds a line to `observed`. fault: name of a deliberate error. quota: maximum
    samples of each class that a client trains on.
    """

    needs_profiles: frozenset[Signal] = frozenset()
    asks_questions = frozenset({"watched-loss"})
    sets_quotas = True

    def __init__(
        self, *, kind: str = "watched-loss", fault: str = "", quota: float = np.inf
    ) -> None:
        self.quota = quota
        self.kind = kind
        self.fault = fault

    def init(self, population: Population) -> State:
        """Return an empty state."""
        return State(scalars={"answers": 0})

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """Ask two questions, then return the cohort."""
        reach("ask")
        if self.fault and self.fault != "no selection":
            yield from faulty(self.fault, context)
        if self.fault == "no selection":
            return None  # type: ignore[return-value]
        first = yield self.ask(context.available)
        reach("answer-1")
        rows = largest(first, max(context.count, len(context.available) // 2))
        second = yield self.ask(rows if len(rows) else context.available)
        reach("answer-2")
        best = largest(second, context.count)
        others = np.setdiff1d(context.available, best)[: context.count - len(best)]
        reasons = [f"loss {second.values['loss'][second.rows == row][0]:.6f}" for row in best]
        return Selection(
            rows=np.concatenate([best, others]),
            reasons=[*reasons, *(["sent no loss"] * len(others))],
            quotas=np.full((len(best) + len(others), 3), self.quota),
        )

    def ask(self, rows: Rows) -> Ask:
        """Return the question to these clients."""
        return Ask(rows=rows, kind=self.kind, names=("loss",))

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Count the answers."""
        seen = {
            "round": outcome.round,
            "asked": [answers.rows.tolist() for answers in outcome.answers],
            "losses": [answers.values["loss"].tolist() for answers in outcome.answers],
        }
        note("observed", json.dumps(seen))
        heard = sum(len(answers.rows) for answers in outcome.answers)
        return State(scalars={"answers": int(state.scalars["answers"] or 0) + heard})


def largest(answers: Answers, count: int) -> Rows:
    """Return the rows with the largest losses, largest first."""
    rows: Rows = answers.rows[np.argsort(-answers.values["loss"], kind="stable")][:count]
    return rows


def faulty(fault: str, context: SelectionContext) -> Generator[Any, Answers, None]:
    """Make the error that `fault` names."""
    if fault == "raises":
        raise KeyError("a bug")
    if fault == "no ask":
        yield "loss"
    while fault == "endless":
        yield Ask(rows=context.available[:1], kind="loss")
    yield Ask(rows=np.array([99]), kind="loss")
