"""The clients and samples that a metric is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The clients and samples that a metric is over.

    clients: number of clients that measured it. asked: number of clients that were asked for it,
    without those that hold no samples for it. Both are 0 on the coordinator's own data. samples:
    number of samples; 0 if masked updates hide it. partial: true if fewer clients measured it than
    the run demands.
    """

    clients: int = 0
    asked: int = 0
    samples: int = 0
    partial: bool = False

    @property
    def incomplete(self) -> bool:
        """True if a client that was asked is missing."""
        return self.clients < self.asked


def coverages(
    counted: Sequence[Mapping[str, int]],
    names: Iterable[str],
    *,
    missing: int = 0,
    least_share: float = 0.0,
) -> dict[str, Coverage]:
    """Return the coverage of each measure, without those that no client was asked for.

    counted: one mapping per client that answered, with its number of samples for each measure.
    missing: number of clients that were asked and did not answer. least_share: share of the
    clients asked below which a measure is partial.
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
