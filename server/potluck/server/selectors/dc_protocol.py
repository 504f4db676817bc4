"""The DC procedure as its paper describes it: secure sums and distances at every step.

Düsing and Cimiano, "Distribution-Controlled Client Selection to Improve Federated Learning
Strategies", §3. `potluck.common.learning.step_by_step` lists what the procedure reveals.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import RunError
from potluck.common.learning.step_by_step import LABEL_DISTANCE
from potluck.server.selection import (
    Answers,
    Ask,
    AskSum,
    Floats,
    Population,
    Selection,
    SelectionContext,
    Selector,
    Summed,
)
from potluck.server.selectors.parts.choosing import TIE, largest
from potluck.server.selectors.parts.dc_parts import begin, distance
from potluck.server.state import State


@dataclass(frozen=True, kw_only=True)
class StepByStep(Selector):
    """Draws clients uniformly, then adds the one that reports the smallest distance to a target.

    target: function that returns the target label distribution. wants_label_totals: True if the
    target is the federation's distribution. added, stop_early: as in the selector that chooses from
    label counts; from the same counts, both choose the same clients. Every step is a secure sum
    over the cohort chosen up to then, and a question to all other clients. Without a sum, or
    without answers, the rest of the cohort is drawn uniformly.
    """

    target: Callable[[Population], Floats]
    added: int
    stop_early: bool
    wants_label_totals: bool

    def select(
        self, state: State, context: SelectionContext
    ) -> Generator[Ask | AskSum, Any, Selection]:
        """Return `count` clients, of which `added` are chosen by the distances that clients
        report."""
        if self.wants_label_totals and context.population.label_totals is None:
            raise RunError(
                "no sum of the federation's label counts is available as a target; choose "
                "dc-balanced, or another disclosure"
            )
        cohort, generator = begin(context, self.added)
        target = np.rint(self.target(context.population))
        why = "drawn uniformly: no other client is left"
        while cohort.missing:
            others = np.setdiff1d(context.available, cohort.rows)
            if not len(others):
                break
            summed = yield AskSum(rows=np.sort(np.array(cohort.rows, dtype=np.int64)))
            if not isinstance(summed, Summed):
                why = "drawn uniformly: the cohort's label counts could not be summed"
                break
            active = summed.total.clip(min=0)
            parameters = {"active": _text(active), "target": _text(target)}
            answers = yield Ask(rows=others, kind=LABEL_DISTANCE, parameters=parameters)
            told = _plausible(answers)
            if not len(told.rows):
                why = "drawn uniformly: no client sent a distance"
                break
            distances = told.values[LABEL_DISTANCE]
            place = largest(-distances, generator)
            before, after = distance(active.astype(np.float64), target), float(distances[place])
            if self.stop_early and after >= before - TIE:
                return cohort.selection()
            cohort.add(int(told.rows[place]), f"says distance to target {before:.4f} → {after:.4f}")
        cohort.draw(cohort.missing, why)
        return cohort.selection()


def _plausible(answers: Answers) -> Answers:
    """Return the answers that can be distances: from 0 to 1, because counts are never negative."""
    values = answers.values[LABEL_DISTANCE]
    good = (values >= -TIE) & (values <= 1 + TIE)
    return Answers(rows=answers.rows[good], values={LABEL_DISTANCE: values[good]})


def _text(numbers: NDArray[Any]) -> str:
    return " ".join(str(int(number)) for number in numbers)
