"""The event of a training: sampling rate, noise and steps, as host and coordinator compute them."""

from __future__ import annotations

from functools import lru_cache

from potluck.client.private_training import CLIENT
from potluck.common.settings.local_training import LocalTraining
from potluck.privacy.accounting import GaussianSteps
from potluck.privacy.answer_noise import rdp_of_answers
from potluck.privacy.client_noise import LARGEST_ROUNDING
from potluck.privacy.rdp_filter import solved_noise
from potluck.rpc.v1 import coordinator_pb2 as rpc


def planned_event(asked: rpc.Privacy, settings: LocalTraining, samples: int) -> GaussianSteps:
    """Return a client's training as an event; solves for the noise if the run gives an ε.

    For noise on whole updates, the event is the upload of an update that rounding has made as long
    as it may be; it does not depend on the samples."""
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
