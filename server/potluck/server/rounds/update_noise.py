"""The noise on clients' whole updates, which is the same for all clients of a run."""

from __future__ import annotations

from potluck.common.run_file.run_settings import PrivateUpdates
from potluck.common.settings.plugins import integration


def noise_multiplier(settings: PrivateUpdates, rounds: int) -> float:
    """Return the noise multiplier of a run with `unit = "client"`; solves for it if needed.

    Raises ConfigurationError if the run's epsilon can't be reached."""
    if settings.noise_multiplier is not None:
        return settings.noise_multiplier
    solve = integration("privacy-noise")
    trainings = settings.trainings or rounds
    return float(solve(epsilon=settings.epsilon, delta=settings.delta, trainings=trainings))
