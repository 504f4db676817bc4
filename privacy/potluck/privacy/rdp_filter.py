"""The filter that keeps a client's trainings within the limit ε that the client's owner set.

The limit holds whatever the coordinator does.

A coordinator chooses each training after it has seen the results of earlier ones, so the number of
trainings and their parameters are adaptive. Each training is an event. At each Rényi order α, the
sum of the events' divergences bounds the divergence of the adaptive composition. This holds as long
as the sum stays below a bound that was fixed in advance (Feldman & Zrnic, NeurIPS 2021; Lécuyer
2021).

The filter uses K orders. It admits an event if at least one order's sum stays below that order's
bound. The results determine which order that is. So each order gets δ/K, and a union bound over the
orders gives the guarantee (ε, δ). The bound of an order follows from the conversion of Canonne,
Kamath & Steinke (2020, Proposition 12), which `dp-accounting` uses too:

    ε ≥ ρ + log(1 - 1/α) + (log(K/δ) - log α)/(α - 1)

The conversion ε ≥ ρ + log(1/δ)/(α - 1) is older and looser. The newer one gains about as much as
the union bound costs. `dp-accounting` has a special case for tiny divergences, which is not used
here. It bounds a whole distribution, but the union bound needs a bound for each order.

Disclosures with pure ε-differential privacy, such as profiles, have divergences too. Their ε also
add up; the sum is the divergence at order infinity. As long as no event has Gaussian noise, this
sum bounds ε and needs no share of δ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Final

from potluck.privacy.accounting import ORDERS, GaussianSteps, noise_for, rdp_of

NOTHING: Final = (0.0,) * len(ORDERS)
_ROUNDING: Final = 1e-12
"""Share of the remaining ε that is left unused, to cover rounding of floating-point numbers."""


@dataclass(frozen=True, kw_only=True)
class RdpFilter:
    """A limit on the privacy loss in a data epoch, and what has been spent of it. Immutable.

    epsilon: owner's limit, ≥ 0. delta: δ of the guarantee, in (0, 1). spent: sum of Rényi
    divergences at each order. largest: exact sum of divergences at order infinity; infinite after
    an event with Gaussian noise.
    """

    epsilon: float
    delta: float
    spent: tuple[float, ...] = field(default=NOTHING)
    largest: Fraction | float = Fraction(0)

    def admits(self, event: GaussianSteps) -> bool:
        """Return True if the limit still holds after the event."""
        return self.with_event(event).epsilon_spent <= self.epsilon

    def with_event(self, event: GaussianSteps) -> RdpFilter:
        """Return the filter after an event; adds it even if `admits` is False."""
        return replace(self, spent=added(self.spent, rdp_of(event)), largest=math.inf)

    def with_events(self, events: Iterable[GaussianSteps]) -> RdpFilter:
        """Return the filter after several events."""
        found = self
        for event in events:
            found = found.with_event(event)
        return found

    def with_pure(self, epsilons: Iterable[Fraction]) -> RdpFilter:
        """Return the filter after disclosures with pure ε-differential privacy, such as profiles.

        Such a disclosure has a divergence of at most min(ε, α ε² / 2) at order α (Bun & Steinke
        2016, Proposition 3.3)."""
        found = self
        for exact in epsilons:
            epsilon = float(exact)
            pure = tuple(min(epsilon, order * epsilon * epsilon / 2) for order in ORDERS)
            found = replace(found, spent=added(found.spent, pure), largest=found.largest + exact)
        return found

    @property
    def epsilon_spent(self) -> float:
        """The total privacy loss ε so far; 0 before the first event or disclosure."""
        return min(epsilon_spent(self.spent, self.delta), float(self.largest))

    @property
    def pure_room(self) -> Fraction:
        """The largest ε of one more disclosure with pure differential privacy; 0 if exhausted.

        `epsilon` must be finite."""
        rooms = [Fraction(0)]
        if self.largest < math.inf:
            rooms.append(Fraction(repr(self.epsilon)) - Fraction(self.largest))
        for order, converted in zip(ORDERS, _converted(self.spent, self.delta), strict=True):
            left = self.epsilon - converted
            if left > 0:  # ε ≤ left, or α ε² / 2 ≤ left
                room = max(left, math.sqrt(2 * left / order))
                rooms.append(Fraction(room * (1 - _ROUNDING)))
        return max(rooms)


def added(some: tuple[float, ...], others: tuple[float, ...]) -> tuple[float, ...]:
    """Return the sum of two lists of Rényi divergences, order by order."""
    return tuple(one + other for one, other in zip(some, others, strict=True))


def epsilon_spent(divergences: tuple[float, ...], delta: float) -> float:
    """Return the ε of adaptively chosen events, from their summed divergences at `ORDERS`."""
    if not any(divergences):
        return 0.0
    return max(0.0, min(_converted(divergences, delta)))


def _converted(divergences: tuple[float, ...], delta: float) -> list[float]:
    """Return the ε that follows from the divergence at each of `ORDERS`."""
    share = math.log(len(ORDERS) / delta)
    pairs = zip(ORDERS, divergences, strict=True)
    return [rho + math.log1p(-1 / a) + (share - math.log(a)) / (a - 1) for a, rho in pairs]


def solved_noise(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    beside: tuple[float, ...] = NOTHING,
) -> float:
    """Return the smallest noise multiplier with which a filter of limit `epsilon` admits all steps.

    steps: total over all trainings. beside: Rényi divergences of all other events that the filter
    admits. Raises ConfigurationError if no noise multiplier suffices.
    """

    def epsilon_of(noise_multiplier: float) -> float:
        event = GaussianSteps(
            sampling_rate=sampling_rate, noise_multiplier=noise_multiplier, steps=steps
        )
        return epsilon_spent(added(rdp_of(event), beside), delta)

    return noise_for(epsilon, epsilon_of)
