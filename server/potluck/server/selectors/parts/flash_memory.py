"""FLASH's state for each client: contexts and rewards, computed from answers and durations.

A context is (robust loss / first robust loss, validation loss / first validation loss, seconds of
the last training, last reward).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular

from potluck.server.selection import Answers, Floats, RoundOutcome, Rows
from potluck.server.selectors.parts.reported import LARGEST, column, plausible
from potluck.server.state import State

# Linear Thompson sampling -------------------------------------------------------------------------
# A reward is modelled as linear in a context of d numbers. The posterior of the d coefficients is
# stored as a precision matrix and a response vector. Each round uses coefficients drawn from the
# posterior.


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Posterior of the coefficients. precision: d × d, V = λI + Σ x xᵀ over contexts x. response:
    d, b = Σ r x with rewards r."""

    precision: Floats
    response: Floats

    @classmethod
    def prior(cls, dimension: int, regularization: float) -> Posterior:
        """Return the posterior before any reward. regularization: λ > 0."""
        return cls(precision=regularization * np.eye(dimension), response=np.zeros(dimension))

    def given(self, contexts: Floats, rewards: Floats) -> Posterior:
        """Return the posterior after n more rewards. contexts: n × d, finite. rewards: n,
        finite."""
        return Posterior(
            precision=self.precision + contexts.T @ contexts,
            response=self.response + rewards @ contexts,
        )

    def estimate(self) -> Floats:
        """Return the estimated coefficients V⁻¹ b."""
        estimate: Floats = cho_solve((self._root(), True), self.response)
        return estimate

    def sample(self, width: float, normal: Floats) -> Floats:
        """Return coefficients drawn from N(estimate, width² V⁻¹). normal: d standard normal
        numbers.

        V = L Lᵀ is factored, never inverted: the offset is width · L⁻ᵀ normal.
        """
        offset: Floats = solve_triangular(self._root(), normal, lower=True, trans=1)
        return self.estimate() + width * offset

    def _root(self) -> Floats:
        # Contexts in raw units make V so ill-conditioned that rounding could turn it indefinite, so
        # a small term is added to its diagonal.
        dimension = len(self.precision)
        slack = dimension * np.finfo(np.float64).eps * np.trace(self.precision)
        root: Floats = cholesky(self.precision + slack * np.eye(dimension), lower=True)
        return root


def exploration_width(
    round_number: int, clients: int, *, dimension: int, regularization: float, delta: float
) -> float:
    """Return the width of exploration, γ_t = √λ + √(d ln((1 + t·m) / δ)). round_number: t, from 0.
    clients: m."""
    return math.sqrt(regularization) + math.sqrt(
        dimension * math.log((1 + round_number * clients) / delta)
    )


# The memory ---------------------------------------------------------------------------------------

Feature = Literal["robust", "validation", "seconds", "reward"]
FEATURES: Final[tuple[Feature, ...]] = get_args(Feature)
"""Names of the numbers in a context, in the order of its columns."""

_FACTOR = 10.0
"""Maximum plausible ratio, duration and reward, as a multiple of the median; larger ones are
limited to it."""
_LEAST_SECONDS = 1e-6
_LEAST_LOSS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Options of FLASH.

    standardised: True to divide durations and rewards by their running means. signed: True if a
    reward is the fall of the loss, and not its absolute change. literal: True to credit a cohort
    with the change that was known when the cohort was chosen. dropped: features that are set to 0
    in all contexts.
    """

    standardised: bool
    signed: bool
    literal: bool = False
    dropped: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One row for each of K clients, and the totals of the rewards.

    first: K × 2, first reported robust and validation loss; NaN before. losses: K × 2, last
    reported losses. seconds: K, duration of the last training; NaN if unknown. rewards: K, last raw
    reward of each client; 0 before the first. earlier: K, the raw reward before that one.
    last_heard: K, int64, round in which `losses` was reported; 0 if never. fresh: K, bool, True if
    the last question gave a reward. awaiting: K, bool, True if the client's reward of the previous
    round has not been credited yet. credited: K × 4, the contexts to which the awaited rewards will
    be credited. totals: Σ seconds, number of these seconds, Σ |reward|, and number of these
    rewards, for the running means.
    """

    first: Floats
    losses: Floats
    seconds: Floats
    rewards: Floats
    earlier: Floats
    last_heard: NDArray[np.int64]
    fresh: NDArray[np.bool_]
    awaiting: NDArray[np.bool_]
    credited: Floats
    totals: Floats
    precision: Floats
    response: Floats

    @classmethod
    def empty(cls, clients: int, regularization: float) -> Memory:
        """Return the memory before the first answer."""
        prior = Posterior.prior(len(FEATURES), regularization)
        return cls(
            first=np.full((clients, 2), np.nan),
            losses=np.full((clients, 2), np.nan),
            seconds=np.full(clients, np.nan),
            rewards=np.zeros(clients),
            earlier=np.zeros(clients),
            last_heard=np.zeros(clients, dtype=np.int64),
            fresh=np.zeros(clients, dtype=np.bool_),
            awaiting=np.zeros(clients, dtype=np.bool_),
            credited=np.zeros((clients, len(FEATURES))),
            totals=np.zeros(4),
            precision=prior.precision,
            response=prior.response,
        )

    @classmethod
    def of(cls, state: State, clients: int) -> Memory:
        """Load a stored memory and add rows for clients that have joined since the last round."""
        arrays = state.arrays
        stored = cls(**{field.name: arrays[field.name] for field in fields(cls)})
        new = cls.empty(max(0, clients - len(stored.seconds)), 1.0)
        grown = {
            field.name: np.concatenate([arrays[field.name], getattr(new, field.name)])
            for field in fields(cls)
            if field.name not in ("totals", "precision", "response")
        }
        return replace(stored, **grown)

    def state(self) -> State:
        """Return the memory as named arrays."""
        return State(arrays={field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def posterior(self) -> Posterior:
        """Return the posterior of the rewards."""
        return Posterior(precision=self.precision, response=self.response)

    # Events -----------------------------------------------------------------------------------

    def heard(self, answers: Answers, round_number: int, rules: Rules) -> Memory:
        """Return the memory, updated with the answers to a question: new contexts, and the rewards
        that become known.

        A client whose losses are not finite and ≥ 0 keeps its last losses and gets no reward.
        """
        clients = len(self.seconds)
        told = np.stack([column(answers, name, clients) for name in ("robust", "validation")], 1)
        told[~(np.isfinite(told) & (told >= 0)).all(axis=1)] = np.nan
        told = np.minimum(told, LARGEST)  # keeps ratios and rewards finite
        heard = ~np.isnan(told[:, 0])
        estimated = plausible(column(answers, "seconds", clients), factor=_FACTOR)
        # 0 on a real clock: the duration is unknown before a training
        estimated[estimated == 0] = np.nan
        seconds = np.where(np.isnan(self.seconds), estimated, self.seconds)
        rewards = self._rewards(told[:, 0], seconds, rules)
        changed = heard & (self.last_heard > 0)
        updated = replace(
            self,
            first=np.where(np.isnan(self.first) & heard[:, None], told, self.first),
            losses=np.where(heard[:, None], told, self.losses),
            seconds=seconds,
            rewards=np.where(changed, rewards, self.rewards),
            earlier=np.where(changed, self.rewards, self.earlier),
            fresh=changed,
            last_heard=np.where(heard, round_number, self.last_heard),
            awaiting=np.zeros_like(self.awaiting),
        )._counted(heard, changed)
        return updated if rules.literal else updated._credit(self.awaiting & changed, rules)

    def with_credited_rewards(self) -> Memory:
        """Return the memory without new rewards: those of the last question were credited then, and
        not every round has a question."""
        return replace(self, fresh=np.zeros_like(self.fresh))

    def trained(self, outcome: RoundOutcome, rules: Rules) -> Memory:
        """Return the memory, updated with a round's durations and with which clients will get a
        reward."""
        seconds = self.seconds.copy()
        measured = np.isfinite(outcome.seconds) & (outcome.seconds >= 0)
        seconds[outcome.selected[measured]] = outcome.seconds[measured]
        failed = np.setdiff1d(outcome.selected, outcome.included)
        if np.isfinite(outcome.deadline_seconds):
            seconds[failed] = outcome.deadline_seconds
        awaiting = np.zeros_like(self.awaiting)
        awaiting[outcome.included] = self.last_heard[outcome.included] > 0
        after = replace(self, seconds=seconds, awaiting=awaiting, credited=self.contexts(rules))
        # `literal` rewards are credited only now, because it was not known before which clients
        # train.
        return after._credit(awaiting & self.fresh, rules) if rules.literal else after

    def settled(self, before: Memory, rules: Rules) -> tuple[Rows, Floats]:
        """Return the clients whose awaited reward became known with the last question, and these
        rewards.

        The rewards are limited to plausible values, and standardised if the rules require it.
        """
        rows = np.flatnonzero(before.awaiting & self.fresh)
        rewards = _limited(self.rewards)[rows]
        return rows, rewards / self._means()[1] if rules.standardised else rewards

    # Numbers ----------------------------------------------------------------------------------

    def contexts(self, rules: Rules) -> Floats:
        """Return the contexts, K × 4. The mean replaces unknown durations; the first losses replace
        unknown losses."""
        ratios = np.stack(
            [
                plausible(losses / np.maximum(first, _LEAST_LOSS), factor=_FACTOR)
                for losses, first in zip(self.losses.T, self.first.T, strict=True)
            ],
            axis=1,
        )
        seconds = _seconds(self.seconds)
        mean_seconds, mean_reward = self._means()
        seconds = np.where(np.isnan(seconds), mean_seconds, seconds)
        rewards = _limited(self.earlier if rules.literal else self.rewards)
        if rules.standardised:
            seconds, rewards = seconds / mean_seconds, rewards / mean_reward
        found = np.column_stack([np.where(np.isnan(ratios), 1.0, ratios), seconds, rewards])
        found[:, [feature in rules.dropped for feature in FEATURES]] = 0.0
        return found

    def _rewards(self, robust: Floats, seconds: Floats, rules: Rules) -> Floats:
        """Return the change of each robust loss per second of training; NaN if loss or duration is
        unknown."""
        fall = self.losses[:, 0] - robust
        known = _seconds(seconds)
        duration = np.where(np.isnan(known), self._means()[0], known)
        rewards: Floats = (fall if rules.signed else np.abs(fall)) / duration
        return rewards

    def _means(self) -> tuple[float, float]:
        """Return the running means of the durations and of |reward|; 1 if there are none yet."""
        seconds, seconds_known, rewards, rewards_known = self.totals.tolist()
        return (
            seconds / seconds_known if seconds > 0 else 1.0,
            rewards / rewards_known if rewards > 0 else 1.0,
        )

    def _counted(self, heard: NDArray[np.bool_], changed: NDArray[np.bool_]) -> Memory:
        """Return the memory with the running means updated by the new contexts."""
        seconds = _seconds(self.seconds)[heard]
        seconds = seconds[~np.isnan(seconds)]
        rewards = np.abs(_limited(self.rewards)[changed])
        more = np.array([seconds.sum(), len(seconds), rewards.sum(), len(rewards)])
        return replace(self, totals=self.totals + more)

    def _credit(self, due: NDArray[np.bool_], rules: Rules) -> Memory:
        rewards = _limited(self.rewards)
        if rules.standardised:
            rewards = rewards / self._means()[1]
        posterior = self.posterior.given(self.credited[due], rewards[due])
        return replace(self, precision=posterior.precision, response=posterior.response)


def _seconds(seconds: Floats) -> Floats:
    """Return durations limited to plausible values, NaN if unknown."""
    return np.maximum(plausible(seconds, factor=_FACTOR), _LEAST_SECONDS)


def _limited(rewards: Floats) -> Floats:
    """Return the rewards, limited to the maximum plausible absolute value."""
    return np.copysign(plausible(np.abs(rewards), factor=_FACTOR), rewards)
