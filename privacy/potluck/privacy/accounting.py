"""Privacy loss of trainings: Rényi divergences of an event (a training or an upload with noise),
and ε by two accountants.

Neighbouring inputs differ by the presence of one record, or have zeros in place of a client's
update. `dp-accounting` does the mathematics. It is imported when it is first used, because that
takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from potluck.common.errors import ConfigurationError

ORDERS: Final[tuple[float, ...]] = (
    1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512,
)  # fmt: skip
"""Orders α of the Rényi divergences in ledgers; few, since with each order `RdpFilter` reports a
slightly larger ε."""

LARGEST_NOISE: Final = 1e4
"""Maximum noise multiplier that the search tries."""
_SMALLEST_NOISE: Final = 1e-2
_ACCURACY: Final = 1e-4
"""Relative accuracy of the search for a noise multiplier."""


@dataclass(frozen=True, kw_only=True)
class GaussianSteps:
    """Steps of DP-SGD (sums over Poisson samples with Gaussian noise), or uploads of an update.

    sampling_rate: probability q that a record is in a step's batch, in (0, 1]; 1 for no sampling.
    noise_multiplier: standard deviation σ > 0 of the noise, in units of the clip.
    steps: number of steps, at least 1.
    """

    sampling_rate: float = 1.0
    noise_multiplier: float
    steps: int = 1

    def __post_init__(self) -> None:
        if not (
            0 < self.sampling_rate <= 1
            and 0 < self.noise_multiplier < math.inf
            and 1 <= self.steps < 2**53
        ):
            raise ValueError(f"not a valid event of the privacy accounting: {self}")

    def dp_event(self) -> Any:
        """Return the event of `dp-accounting`."""
        import dp_accounting as dp

        noise = dp.GaussianDpEvent(self.noise_multiplier)
        sampled = dp.PoissonSampledDpEvent(self.sampling_rate, noise)
        return dp.SelfComposedDpEvent(sampled, self.steps)


@lru_cache(maxsize=1024)
def rdp_of(event: GaussianSteps) -> tuple[float, ...]:
    """Return the Rényi divergence (≥ 0, or infinite) of an event at each of `ORDERS`."""
    one = _rdp_of_a_step(event.sampling_rate, event.noise_multiplier)
    return tuple(each * event.steps for each in one)


@lru_cache(maxsize=1024)
def _rdp_of_a_step(sampling_rate: float, noise_multiplier: float) -> tuple[float, ...]:
    if sampling_rate == 1.0:
        return tuple(order / (2 * noise_multiplier**2) for order in ORDERS)

    from dp_accounting.rdp import RdpAccountant

    step = GaussianSteps(sampling_rate=sampling_rate, noise_multiplier=noise_multiplier)
    accountant = RdpAccountant(ORDERS).compose(step.dp_event())
    found = [float(each) for each in accountant._rdp]
    return tuple(math.inf if math.isnan(each) else max(0.0, each) for each in found)


def epsilon_by_rdp(events: Iterable[GaussianSteps], delta: float) -> float:
    """Return ε of events that were fixed in advance, by Rényi divergences at the orders of
    `dp-accounting`."""
    from dp_accounting.rdp import RdpAccountant

    return _composed(RdpAccountant(), events, delta)


def epsilon_by_pld(events: Iterable[GaussianSteps], delta: float) -> float:
    """Return ε of events that were fixed in advance, from their privacy loss distribution.

    Tighter than `epsilon_by_rdp`. Holds only if no event depends on an earlier event's result."""
    from dp_accounting.pld import PLDAccountant

    return _composed(PLDAccountant(), events, delta)


def _composed(accountant: Any, events: Iterable[GaussianSteps], delta: float) -> float:
    for event in events:
        accountant.compose(event.dp_event())
    return float(accountant.get_epsilon(delta))


def noise_for(epsilon: float, epsilon_of: Callable[[float], float]) -> float:
    """Return the smallest noise multiplier, to four digits, for which ε is at most `epsilon`.

    epsilon_of: returns ε for a noise multiplier; a larger one must not give a larger ε.
    Raises ConfigurationError if no noise multiplier up to `LARGEST_NOISE` suffices.
    """
    low, high = _SMALLEST_NOISE, 1.0
    while epsilon_of(high) > epsilon:
        low, high = high, 2 * high
        if high > LARGEST_NOISE:
            raise ConfigurationError(
                f"no noise multiplier up to {LARGEST_NOISE:g} gives ε = {epsilon:g}; raise "
                "epsilon, or lower the number of trainings, answers or steps",
                epsilon=epsilon,
            )
    while high - low > _ACCURACY * high:
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon_of(middle) <= epsilon else (middle, high)
    return high
