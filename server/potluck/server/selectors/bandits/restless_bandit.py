"""Restless bandits, adapted to the selection of clients.

FLASH compares itself with a bandit whose rewards depend on a hidden Markov state, but does not
describe how clients become the arms. Here all clients share one state, derived from each round's
mean reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from potluck.server.selection import Floats, Rows
from potluck.server.selectors.bandits.context_bandit import ContextBandit, Lesson
from potluck.server.state import State

_FEWEST = 1e-9


@dataclass(frozen=True, kw_only=True)
class RestlessBandit(ContextBandit):
    """Selects clients with the largest rewards in the state that is expected next.

    The score is Σ_s P(s) (mean reward in s + √(2 ln t / n in s)), over shared states s. states:
    number of states. The state of a round is the quantile of its mean reward among all earlier
    rounds. The next state is predicted from how often one state followed another. discount: factor
    on all counts for each round of age. In a state in which a client was never selected, its
    expected reward is its mean in the other states.

    Clients without a reward come first, but a failed round counts as a try. O(K · states).
    """

    states: Annotated[int, Field(ge=1, le=10)] = 2
    discount: Annotated[float, Field(gt=0, le=1)] = 0.99

    def beginning(self) -> State:
        """Return the bandit's state before the first reward."""
        return State(
            scalars={"last_state": 0},
            arrays={
                "counts": np.zeros((0, self.states)),
                "sums": np.zeros((0, self.states)),
                "failures": np.zeros(0),
                "transitions": np.zeros((self.states, self.states)),
                "means": np.zeros(0),
            },
        )

    def learned(self, known: State, lesson: Lesson, clients: int) -> State:
        """Add the rewards to the state of their round, and discount all counts."""
        arrays = _grown(known, clients)
        counts, sums = arrays["counts"].copy(), arrays["sums"].copy()
        transitions, means = arrays["transitions"].copy(), arrays["means"]
        last = int(known.scalars["last_state"] or 0)
        if len(lesson.rows):
            mean = float(lesson.rewards.mean())
            now = state_of(mean, means, self.states)
            counts[lesson.rows, now] += 1
            sums[lesson.rows, now] += lesson.rewards
            transitions[last, now] += 1 if len(means) else 0
            means, last = np.append(means, mean), now
        return State(
            scalars={"last_state": last},
            arrays={
                "counts": counts * self.discount,
                "sums": sums * self.discount,
                "failures": arrays["failures"] * self.discount,
                "transitions": transitions * self.discount,
                "means": means,
            },
        )

    def failed(self, known: State, rows: Rows, clients: int) -> State:
        """Count a try without a reward for each of these clients."""
        arrays = _grown(known, clients)
        failures = arrays["failures"].copy()
        failures[rows] += 1
        return State(scalars=known.scalars, arrays={**arrays, "failures": failures})

    def scores(
        self, known: State, contexts: Floats, rows: Rows, number: int
    ) -> tuple[Floats, Floats]:
        """Return each row's expected reward and bonus: means over the states, weighted by their
        probabilities."""
        arrays = _grown(known, len(contexts))
        followed = arrays["transitions"][int(known.scalars["last_state"] or 0)] + 1.0
        return upper_bounds(
            arrays["counts"][rows],
            arrays["sums"][rows],
            arrays["failures"][rows],
            followed / followed.sum(),
            number,
        )


def state_of(mean: float, before: Floats, states: int) -> int:
    """Return which of `states` quantiles of the earlier rounds' mean rewards this round's mean
    falls into; 0 without earlier rounds."""
    if not len(before):
        return 0
    borders = np.quantile(before, np.arange(1, states) / states)
    return int(np.searchsorted(borders, mean, side="left"))


def upper_bounds(
    counts: Floats, sums: Floats, failures: Floats, likely: Floats, number: int
) -> tuple[Floats, Floats]:
    """Return n expected rewards and n bonuses; the bonus of a client that was never tried is
    infinite.

    counts, sums: n × states. failures: n. likely: probability of each state. number: number of the
    round.
    """
    total = counts.sum(axis=1, keepdims=True)
    seen = counts > _FEWEST
    tries = np.where(seen, counts, total) + failures[:, None]
    overall = sums.sum(axis=1, keepdims=True) / np.maximum(total, _FEWEST)
    means = np.where(seen, sums / np.maximum(counts, _FEWEST), np.where(total > 0, overall, 0.0))
    bonus = np.sqrt(2 * np.log(max(number, 1)) / np.maximum(tries, _FEWEST))
    tried = (total[:, 0] + failures) > _FEWEST
    return means @ likely, np.where(tried, bonus @ likely, np.inf)


def _grown(known: State, clients: int) -> dict[str, Floats]:
    """Return the state with rows for clients that have joined since the last round."""
    arrays = dict(known.arrays)
    more = max(0, clients - len(arrays["failures"]))
    for name in ("counts", "sums", "failures"):
        array = arrays[name]
        arrays[name] = np.concatenate([array, np.zeros((more, *array.shape[1:]))])
    return arrays
