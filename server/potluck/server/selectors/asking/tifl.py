"""TiFL: groups clients into tiers by speed, and draws each cohort from one tier.

Chai et al., "TiFL: A Tier-based Federated Learning System", 2020, Alg. 2. Details that the paper
leaves open follow public implementations by other authors.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt

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
from potluck.server.selectors.parts.choosing import Cohort, grown, weighted
from potluck.server.selectors.parts.durations import longest, within_reason
from potluck.server.selectors.parts.reported import column, plausible
from potluck.server.state import State

_LOSS = "loss"
_FACTOR = 100.0
"""Maximum plausible loss, as a multiple of the clients' median; larger losses are limited to it."""


@dataclass(frozen=True, kw_only=True)
class TiFL(Selector):
    """Groups clients by speed; draws each cohort from one group, often with high loss.

    At first, all clients are selected once, in random order. Then they are sorted by their mean
    time and split into `tiers` groups (tiers) of equal size, again in each round. Every `interval`
    rounds, clients of all tiers report their loss. If the mean loss of the last used tier has not
    fallen since the previous time, the tiers get new probabilities by falling loss: n, n − 1, … of
    n(n + 1)/2, with n the number of tiers that have credits.

    tiers: number of tiers. interval: number of rounds between two reports of losses. asked: maximum
    number of clients per tier that report their loss, drawn at random; 0 for all, as in the paper.
    credits: maximum number of rounds that use a tier; 0 for the run's rounds divided by the tiers,
    rounded up, or no maximum if the number of rounds is not known.

    The paper uses the tiers' accuracy. A failed training counts as long as the round's deadline; a
    client without any known time counts as slowest. O(K log K).
    """

    tiers: PositiveInt = 5
    interval: PositiveInt = 10
    asked: NonNegativeInt = 20
    credits: NonNegativeInt = 0

    asks_questions = frozenset({_LOSS})

    def init(self, population: Population) -> State:
        """Return the initial state.

        For each row, it has the sum of its seconds, the number of durations in this sum, and how
        often it was selected. For each tier, it has its probability, the number of rounds that used
        it and its last mean loss (NaN: unknown). The scalar `last` is the last used tier, or -1.
        """
        clients = len(population)
        return State(
            scalars={"last": -1},
            arrays={
                "seconds": np.zeros(clients),
                "times": np.zeros(clients, dtype=np.int64),
                "tried": np.zeros(clients, dtype=np.int64),
                "probabilities": np.full(self.tiers, 1 / self.tiers),
                "used": np.zeros(self.tiers, dtype=np.int64),
                "losses": np.full(self.tiers, np.nan),
            },
        )

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """Return clients of one tier; if it has too few, also of the nearest tiers."""
        generator = context.generator("tifl")
        cohort = Cohort(context, generator)
        tried = grown(state.arrays["tried"], len(context.population))
        new = context.available[tried[context.available] == 0]
        if len(new) or not cohort.size:
            cohort.draw(cohort.missing, "its speed is not known yet", new)
            cohort.draw(cohort.missing, "too few other clients")
            return cohort.selection()
        groups = self._groups(state)
        here = [np.intersect1d(group, context.available, assume_unique=True) for group in groups]
        if context.round % self.interval == 0:
            asked = [generator.permutation(rows)[: self.asked or len(rows)] for rows in here]
            answers = yield Ask(rows=np.sort(np.concatenate(asked)), kind=_LOSS)
            state = self._judged(state, groups, answers)
        chosen = self._chosen(state, context, here, generator)
        for tier in sorted(range(self.tiers), key=lambda each: (abs(each - chosen), each)):
            why = "drawn from" if tier == chosen else "added from"
            cohort.draw(cohort.missing, f"{why} tier {tier + 1} of {self.tiers}", here[tier])
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Store durations, losses and the tier that was used."""
        length = max(len(state.arrays["tried"]), int(outcome.cohort.max(initial=-1)) + 1)
        groups = self._groups(state)
        for answers in outcome.answers:
            state = self._judged(state, groups, answers)
        arrays = dict(state.arrays)
        for name in ("seconds", "times", "tried"):
            arrays[name] = grown(arrays[name], length)
        last = state.scalars["last"]
        if len(outcome.selected) and self._profiled(state, outcome.selected):
            [last] = [t for t, rows in enumerate(groups) if outcome.selected[0] in rows]
            arrays["used"] = arrays["used"] + (np.arange(self.tiers) == last)
        failed = ~np.isin(outcome.selected, outcome.included)
        seconds = np.where(failed, outcome.deadline_seconds, outcome.seconds)
        # a surplus client was slower than all others, so it took at least the longest time
        rows = np.concatenate([outcome.selected, outcome.surplus])
        seconds = np.append(seconds, np.full(len(outcome.surplus), longest(outcome)))
        measured = np.isfinite(seconds) & (seconds >= 0)
        arrays["seconds"][rows[measured]] += np.minimum(seconds[measured], 1e9)
        arrays["times"][rows[measured]] += 1
        arrays["tried"][outcome.cohort] += 1
        return State(scalars={"last": last}, arrays=arrays)

    def _profiled(self, state: State, rows: Rows) -> bool:
        """Return True if all of these clients were selected before."""
        tried = state.arrays["tried"]
        return bool((rows < len(tried)).all() and (tried[rows] > 0).all())

    def _groups(self, state: State) -> list[Rows]:
        """Return the rows of each tier, fastest tier first, sorted by time, then by row."""
        rows = np.flatnonzero(state.arrays["tried"])
        times = state.arrays["times"][rows]
        seconds = np.full(len(rows), np.nan)
        np.divide(state.arrays["seconds"][rows], times, out=seconds, where=times > 0)
        mean = within_reason(seconds)
        order = rows[np.argsort(np.where(np.isnan(mean), np.inf, mean), kind="stable")]
        return np.array_split(order, self.tiers)

    def _judged(self, state: State, groups: Sequence[Rows], answers: Answers) -> State:
        """Return the state with the tiers' losses, and new probabilities if the last used tier has
        not improved."""
        length = 1 + max(int(rows.max(initial=-1)) for rows in (*groups, answers.rows))
        told = plausible(column(answers, _LOSS, length), factor=_FACTOR)
        losses = np.array([_mean(told[rows]) for rows in groups])
        before, last = state.arrays["losses"], state.scalars["last"]
        arrays = {**state.arrays, "losses": losses}
        if isinstance(last, int) and last >= 0 and losses[last] >= before[last]:
            arrays["probabilities"] = by_loss(losses)
        return State(scalars=state.scalars, arrays=arrays)

    def _chosen(
        self,
        state: State,
        context: SelectionContext,
        here: Sequence[Rows],
        generator: np.random.Generator,
    ) -> int:
        """Draw a tier with available clients. Tiers without credits are drawn only if no tier with
        available clients has any."""
        present = np.array([len(rows) > 0 for rows in here])
        most = self.credits or (math.ceil(context.rounds / self.tiers) if context.rounds else 0)
        chances, open_tiers = state.arrays["probabilities"], present
        credit = state.arrays["used"] < most if most else np.ones(self.tiers, dtype=np.bool_)
        if (present & credit).any():
            chances, open_tiers = ranked_again(chances, credit), present & credit
        position = weighted(np.where(open_tiers, chances, 0.0), generator)
        return int(np.flatnonzero(open_tiers)[0]) if position is None else position


def by_loss(losses: Floats) -> Floats:
    """Return the probability of each tier: n/D for the largest loss, then (n − 1)/D, …, with D =
    n(n + 1)/2. Unknown losses come last, and equal ones in the order of the tiers."""
    count = len(losses)
    order = np.argsort(-np.where(np.isnan(losses), -np.inf, losses), kind="stable")
    found = np.empty(count)
    found[order] = np.arange(count, 0, -1) / (count * (count + 1) / 2)
    return found


def ranked_again(probabilities: Floats, credit: NDArray[np.bool_]) -> Floats:
    """Return the probabilities if only the tiers with credits are ranked; 0 for the others.

    Returns them unchanged if all of them are equal.
    """
    if np.ptp(probabilities) == 0:
        return probabilities
    found = np.zeros(len(probabilities))
    found[credit] = by_loss(probabilities[credit])  # they fall as the losses do
    return found


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan
