"""Facts about a metric: the clients and samples behind it, and its spread over clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from potluck.common.trainer import Measure

# Coverage -----------------------------------------------------------------------------------------

_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Number of clients and samples behind a metric.

    clients: number of clients that measured the metric. asked: number of clients that were asked
    for the metric, without clients that have no samples for it. Both are 0 if the coordinator
    measured it on its own data. samples: number of samples; 0 if masked updates hide it. partial:
    True if fewer clients measured the metric than the run requires.
    """

    clients: int = 0
    asked: int = 0
    samples: int = 0
    partial: bool = False

    @property
    def incomplete(self) -> bool:
        """True if a client that was asked did not measure the metric."""
        return self.clients < self.asked


def coverages(
    counted: Sequence[Mapping[str, int]],
    names: Iterable[str],
    *,
    missing: int = 0,
    least_share: float = 0.0,
) -> dict[str, Coverage]:
    """Return the coverage of each measure that at least one client was asked for.

    counted: one mapping per client that answered, with its number of samples for each measure.
    missing: number of clients that were asked and did not answer. least_share: minimum share of the
    asked clients; if fewer answered, the coverage is partial.
    """
    found = {}
    for name in names:
        samples = [each[name] for each in counted if each.get(name, 0)]
        asked = len(samples) + missing
        if asked:
            found[name] = Coverage(
                clients=len(samples),
                asked=asked,
                samples=sum(samples),
                partial=len(samples) < least_share * asked - _SLACK,
            )
    return found


# Spread -------------------------------------------------------------------------------------------

QUANTILES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
"""The quantiles, each given as the share of clients below it.

Without minimum and maximum, which are single clients' values.
"""
LEAST_GROUP: Final = 5
"""Default minimum number of clients whose values a spread combines; a run, or a data owner, may set
another number."""
SMALLEST_GROUP: Final = 3
"""Smallest minimum that a run or a data owner may set: in a group of two, each client could compute
the other's value."""
_FEWEST_WORST: Final = 2


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A measure over clients; each client has the same weight, independent of its number of
    samples.

    clients: number of clients. mean: mean of their values. quantiles: values at the shares in
    `QUANTILES`, interpolated linearly. worst_tenth: mean over the tenth of the clients (rounded up,
    at least two) for which the measure is worst. asked, samples, partial: as in `Coverage`.
    """

    clients: int
    mean: float
    quantiles: Mapping[float, float]
    worst_tenth: float
    asked: int = 0
    samples: int = 0
    partial: bool = False

    @property
    def coverage(self) -> Coverage:
        """Numbers of clients and samples behind the spread."""
        return Coverage(
            clients=self.clients, asked=self.asked, samples=self.samples, partial=self.partial
        )

    @property
    def statistics(self) -> tuple[float, ...]:
        """The mean, the quantiles and the worst tenth, in this order."""
        return (self.mean, *self.quantiles.values(), self.worst_tenth)


def spread(values: Sequence[float], *, higher_is_better: bool) -> Spread:
    """Return the spread of the values of two or more clients, given in any order."""
    import numpy as np  # takes a tenth of a second, and most commands of `potluck` don't need it

    ordered = np.sort(np.asarray(values, dtype=np.float64))
    count = max(_FEWEST_WORST, math.ceil(len(ordered) / 10))
    worst = ordered[:count] if higher_is_better else ordered[-count:]
    return Spread(
        clients=len(ordered),
        mean=float(ordered.mean()),
        quantiles=dict(zip(QUANTILES, np.quantile(ordered, QUANTILES).tolist(), strict=True)),
        worst_tenth=float(worst.mean()),
    )


def spreads(
    found: Sequence[Mapping[str, float]], measures: Mapping[str, Measure], *, least_group: int
) -> dict[str, Spread]:
    """Return, by name, the spread of each measure for which enough clients have a value.

    found: each client's values, by name. measures: the declared measures. least_group: minimum
    number of clients, raised to `SMALLEST_GROUP` if lower.
    """
    spread_of = {}
    for name, measure in measures.items():
        values = [client[name] for client in found if name in client]
        if len(values) >= max(least_group, SMALLEST_GROUP):
            spread_of[name] = spread(values, higher_is_better=measure.higher_is_better)
    return spread_of
