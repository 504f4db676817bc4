"""Selectors that steer a cohort towards a label distribution (Düsing & Cimiano)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt

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
    Signal,
    Summed,
)
from potluck.server.selectors.parts.choosing import TIE, largest
from potluck.server.selectors.parts.dc_parts import (
    balanced,
    begin,
    candidates,
    distance,
    federation_total,
)
from potluck.server.selectors.parts.parallel import Pass, passes
from potluck.server.state import State

# The procedure of the paper -----------------------------------------------------------------------
# Düsing and Cimiano, "Distribution-Controlled Client Selection to Improve Federated Learning
# Strategies", §3. `potluck.common.learning.step_by_step` lists what the procedure reveals.


@dataclass(frozen=True, kw_only=True)
class StepByStep(Selector):
    """Draws clients uniformly, then adds the one that reports the smallest distance to a target.

    target: function that returns the target label distribution. wants_label_totals: True if the
    target is the federation's distribution. added, stop_early: as in `DcReal`, which chooses
    the same clients from the same label counts. Each step makes a secure sum over the clients
    chosen so far, and asks all other clients for their distance. If the sum or the answers are
    missing, the rest of the cohort is drawn uniformly.
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


# The selectors ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Steered(Selector):
    """Draws some clients uniformly, then adds those that bring the cohort's labels nearest to a
    target.

    added: number of clients of `count` that are chosen by the target, one after another.
    stop_early: True to stop once no client brings the cohort nearer by more than 1e-12; the cohort
    is then smaller than `count`.

    Clients without a profile can only be drawn uniformly, or fill a cohort if no others are left.
    O(added · K · classes).
    """

    added: NonNegativeInt = 5
    stop_early: bool = False

    needs_profiles = frozenset({Signal.LABEL_COUNTS})

    def by_protocol(self) -> Selector:
        """Return the selector that chooses from secure sums and reported distances, as in the
        paper."""
        return StepByStep(
            target=self.target,
            added=self.added,
            stop_early=self.stop_early,
            wants_label_totals=self.wants_label_totals,
        )

    @abstractmethod
    def target(self, population: Population) -> Floats:
        """Return the target label distribution: one number ≥ 0 per class."""

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return `count` clients, of which `added` are chosen by the target."""
        cohort, generator = begin(context, self.added)
        rows, counts, base = candidates(context, cohort)
        stopped = False
        if len(rows):
            target = self.target(context.population)
            steering = _Steering(counts, base, target)
            with passes(len(rows)) as run:
                for _ in range(min(cohort.missing, len(rows))):
                    before = steering.distance
                    place = largest(-steering.distances(run), generator)
                    after = steering.take(place)
                    stopped = self.stop_early and after >= before - TIE
                    if stopped:
                        break
                    cohort.add(int(rows[place]), f"distance to target {before:.4f} → {after:.4f}")
        if not stopped:
            cohort.draw(cohort.missing, "no label counts; drawn uniformly")
        return cohort.selection()


class DcReal(_Steered):
    """Adds clients that bring the cohort's labels closest to the whole federation's."""

    wants_label_totals = True
    """True: the selector uses the label counts summed over all clients, from a secure sum if the
    run can have one."""

    def target(self, population: Population) -> Floats:
        """Return the sum of all clients' label counts."""
        return federation_total(population)


class DcBalanced(_Steered):
    """Adds clients that bring the cohort closest to equally many samples per class."""

    def target(self, population: Population) -> Floats:
        """Return a 1 for each class."""
        return balanced(population)


@dataclass(frozen=True, kw_only=True)
class DcRandom(Selector):
    """Draws all clients uniformly: the baseline for the other `dc` selectors.

    added: number of clients of `count` that come from the second of two draws. Needs no profile.
    """

    added: NonNegativeInt = 5

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return `count` clients in two uniform draws."""
        cohort, _ = begin(context, self.added)
        cohort.draw(cohort.missing, "added uniformly")
        return cohort.selection()


class _Steering:
    """A sum of label counts, and its distances from a target after adding each of K clients to the
    sum.

    counts: K × classes, label counts of the clients.
    """

    def __init__(self, counts: Floats, base: Floats, target: Floats) -> None:
        self._counts = counts
        self._target = target
        self._along = counts @ target
        self._squares = np.einsum("ij,ij->i", counts, counts)
        self._base = base
        self._distances = np.empty(len(counts))
        self._taken: list[int] = []

    @property
    def distance(self) -> float:
        """Distance of the sum itself from the target."""
        return distance(self._base, self._target)

    def distances(self, run: Pass) -> Floats:
        """Return, for each client, the distance of the sum with this client added.

        It is infinite for clients already taken. The next call overwrites the returned array.
        """
        base_along = float(self._base @ self._target)
        base_square = float(self._base @ self._base)
        target_norm = float(np.linalg.norm(self._target))

        def block(start: int, stop: int) -> None:
            # With V a client's counts and B the sum, |V + B|² = |V|² + 2 V·B + |B|²: one product
            # with the whole table instead of a sum for each row
            norms = self._counts[start:stop] @ (2 * self._base)
            norms += self._squares[start:stop]
            norms += base_square
            np.sqrt(norms, out=norms)
            norms *= target_norm
            empty = norms <= 0
            norms[empty] = np.inf
            self._distances[start:stop] = 1 - (self._along[start:stop] + base_along) / norms

        run(block)
        self._distances[self._taken] = np.inf
        return self._distances

    def take(self, place: int) -> float:
        """Add a client to the sum; return the new distance."""
        self._taken.append(place)
        self._base = self._base + self._counts[place]
        return self.distance
