"""Events of trainings and answers, and the noise that keeps them within a run's ε.

Host, coordinator and planner compute the same events from a run's terms.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from potluck.common.settings.local_training import LocalTraining
from potluck.privacy.accounting import GaussianSteps, rdp_of
from potluck.privacy.rdp_filter import NOTHING, solved_noise
from potluck.rpc.v1 import coordinator_pb2 as rpc

CLIENT: Final = "client"
"""The unit of noise on whole updates, in `Privacy.unit`."""
LARGEST_ROUNDING: Final = 1e-3
"""Maximum of √d / (2 C S): the fraction by which rounding may lengthen an update."""
ANSWER_SHARE: Final = 0.25
"""Fraction of a run's ε for all answers, if the run does not set their noise."""


@lru_cache(maxsize=64)
def noise_multiplier_for(*, epsilon: float, delta: float, trainings: int) -> float:
    """Return the noise multiplier with which a client's `trainings` updates spend `epsilon`.

    Raises ConfigurationError if none suffices."""
    solved = solved_noise(epsilon=epsilon, delta=delta, sampling_rate=1.0, steps=trainings)
    return solved * (1 + LARGEST_ROUNDING)


def planned_event(asked: rpc.Privacy, settings: LocalTraining, samples: int) -> GaussianSteps:
    """Return a client's training as an event for the accountant; compute the noise if the run gives
    an ε.

    For noise on whole updates, the event is the upload of an update with the largest norm that
    rounding allows; it does not depend on `samples`."""
    if asked.unit == CLIENT:
        return GaussianSteps(noise_multiplier=asked.noise_multiplier / (1 + LARGEST_ROUNDING))
    rate = min(1.0, settings.batch_size / samples)
    steps = settings.planned_steps(samples)
    noise = asked.noise_multiplier or _solved(
        asked.epsilon, asked.delta, rate, steps * asked.trainings, rdp_of_answers(asked)
    )
    return GaussianSteps(sampling_rate=rate, noise_multiplier=noise, steps=steps)


@lru_cache(maxsize=1024)
def _solved(
    epsilon: float, delta: float, rate: float, steps: int, beside: tuple[float, ...]
) -> float:
    return solved_noise(
        epsilon=epsilon, delta=delta, sampling_rate=rate, steps=steps, beside=beside
    )


def answer_noise(asked: rpc.Privacy) -> float:
    """Return the noise multiplier of a run's answers; compute it if the run sets none."""
    if asked.answer_noise_multiplier:
        return asked.answer_noise_multiplier
    return _solved_for_answers(asked.epsilon, asked.delta, asked.answers)


@lru_cache(maxsize=1024)
def _solved_for_answers(epsilon: float, delta: float, answers: int) -> float:
    return solved_noise(
        epsilon=ANSWER_SHARE * epsilon, delta=delta, sampling_rate=1.0, steps=answers
    )


def rdp_of_answers(asked: rpc.Privacy) -> tuple[float, ...]:
    """Return the Rényi divergences of all answers that a run plans for a client."""
    return rdp_of(planned_answers(asked)) if asked.answers else NOTHING


def planned_answers(asked: rpc.Privacy) -> GaussianSteps:
    """Return all answers that a run plans for a client as one event for the accountant; there must
    be at least one answer."""
    return GaussianSteps(noise_multiplier=answer_noise(asked), steps=asked.answers)
