"""The numbers of clients and samples behind a metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Number of clients and samples behind a metric.

    clients: number of clients that measured the metric. asked: number of clients that were asked
    for it, without those that have no samples for it. Both are 0 if the coordinator measured it on
    its own data. samples: number of samples; 0 if masked updates hide it. partial: True if fewer
    clients measured the metric than the run requires.
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
