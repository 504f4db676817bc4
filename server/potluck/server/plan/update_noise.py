"""The noise on clients' whole updates, and the bound on the updates' norms; both are the same for
all clients.

The bound may follow a quantile of the norms (adaptive clipping, Andrew et al. 2021). It is then a
scalar in the strategy's state, so a resumed run continues with the bound of its last committed
round. The bound follows from noisy counts only, so publishing it costs no additional privacy loss.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from potluck.common.disclosure import LARGEST_CLIP, SMALLEST_CLIP
from potluck.common.run_file.run_settings import PrivateUpdates
from potluck.common.settings.plugins import integration
from potluck.server.state import State

CLIP: Final = "privacy_clip"
"""Name of the bound on update norms in the strategy's state."""

_RATE: Final = 0.2


def noise_multiplier(settings: PrivateUpdates, rounds: int) -> float:
    """Return the noise multiplier of a run with `unit = "client"`: the run file's, or one solved
    from epsilon.

    Raises ConfigurationError if the run's epsilon can't be reached."""
    if settings.noise_multiplier is not None:
        return settings.noise_multiplier
    solve = integration("privacy-noise")
    trainings = settings.trainings or rounds
    return float(solve(epsilon=settings.epsilon, delta=settings.delta, trainings=trainings))


def clip_of(state: State, settings: PrivateUpdates) -> float:
    """Return the bound on update norms for the round that begins from this state."""
    found = state.scalars.get(CLIP)
    return found if isinstance(found, float) else settings.clip


def with_clip(state: State, clip: float) -> State:
    """Return the strategy's state with the bound on update norms for the next round."""
    return replace(state, scalars={**state.scalars, CLIP: clip})


def without_clip(state: State) -> State:
    """Return the state without the bound on update norms, as the strategy expects it."""
    scalars = {name: value for name, value in state.scalars.items() if name != CLIP}
    return replace(state, scalars=scalars)


def adapted(clip: float, within: float, settings: PrivateUpdates) -> float:
    """Return the next round's bound on update norms: clip · exp(-0.2 · (within - quantile)).

    within: noisy share of the updates with a norm of at most `clip`."""
    step = _RATE * (within - (settings.clip_quantile or 0.0))
    return min(max(clip * math.exp(-min(max(step, -50.0), 50.0)), SMALLEST_CLIP), LARGEST_CLIP)
