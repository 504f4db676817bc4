"""RHFL's weights: higher for clients whose loss falls (Fang & Ye, CVPR 2022, Eqs. 11–13)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging
from potluck.server.strategy import Combine, RoundContext, UpdateStatistics, Weights

_LOSS: Final = "loss/"
_FALL_COUNTS: Final = 0.5
_NO_FALL: Final = 1e-8


@dataclass(frozen=True, kw_only=True)
class RHFL(Averaging):
    """Averages the updates, with larger weights for clients whose loss fell more.

    w ← Σ a_k·w_k with a = softmax(1/(N − 1) + ½·q/Σq) over the N updates of the round.

    q_k = (L_before − L)/L, the relative fall of a client's loss since it last took part, at least
    0. It is 0 for a client that takes part for the first time. If no client's loss fell, all
    clients have the same weight. Numbers of samples have no effect. The losses are those of the
    run's objective, as clients report them; the paper trains with `symmetric-cross-entropy`.
    """

    individual = True
    by_samples = False

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the mean of the updates, weighted by the fall of each client's loss."""
        return Combine(weights=confidence(losses_before(statistics), statistics.losses))

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return the mean as the next model, and the state with the round's losses."""
        following, _ = super().apply(state, model, combined, context)
        return following, State(scalars={**state.scalars, **losses_told(context)})


def losses_before(statistics: UpdateStatistics) -> NDArray[np.float64]:
    """Return the loss that each client reported when it last took part: N values, NaN if
    unknown."""
    before = [statistics.state.scalars.get(_LOSS + client) for client in statistics.clients]
    return np.array([np.nan if loss is None else float(loss) for loss in before])


def losses_told(context: RoundContext) -> dict[str, float]:
    """Return the round's losses as scalars of a state, which `losses_before` reads in later
    rounds."""
    told = zip(context.included, context.losses.tolist(), strict=True)
    return {_LOSS + client: loss for client, loss in told if np.isfinite(loss)}


def confidence(before: NDArray[np.float64], losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the clients' weights, which sum to 1. before, losses: N each, NaN if unknown."""
    count = len(losses)
    known = np.isfinite(before) & np.isfinite(losses) & (losses > 0) & (before > losses)
    # no warning for overflows: they are replaced by the largest float
    with np.errstate(all="ignore"):
        fall = np.where(known, np.nan_to_num((before - losses) / losses), 0.0)
    largest = fall.max(initial=0.0)
    if largest < _NO_FALL:
        return np.full(count, 1.0 / count)
    shares = fall / largest
    exponentials = np.exp(1.0 / max(1, count - 1) + _FALL_COUNTS * shares / shares.sum())
    return np.asarray(exponentials / exponentials.sum())
