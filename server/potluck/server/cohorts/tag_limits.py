"""A bound on the clients of a cohort that share a tag, such as their site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from potluck.server.selection import Rows


def narrowed(
    chosen: Rows, available: Rows, limits: Sequence[tuple[Sequence[str], int]]
) -> Rows | None:
    """The rows to choose among again, where a cohort has too many clients with one value of a tag:
    of such a value only those chosen first stay. None where the cohort is within all limits.

    Choosing again and again ends: each time a value has fewer clients left than before, and one
    that is down to its limit can't exceed it. So any selector may do the choosing, and what it
    finds best is kept.

    chosen: in the order chosen. limits: for each bounded tag, the value of every row of the run's
    clients, and the most clients with the same value.
    """
    excess = np.zeros(0, dtype=np.int64)
    for values, most in limits:
        column = np.array([values[row] for row in chosen])
        for value in np.unique(column):
            first = chosen[column == value][:most]
            if np.count_nonzero(column == value) > most:
                sharing = [row for row in available.tolist() if values[row] == value]
                excess = np.union1d(excess, np.setdiff1d(sharing, first))
    return np.setdiff1d(available, excess) if len(excess) else None


def ineligible(tags: Mapping[str, str], eligible: Mapping[str, Sequence[str]]) -> str:
    """The reason why clients of a host with these tags take no part; empty where they do."""
    for name, values in eligible.items():
        if tags.get(name) not in values:
            has = f"is {tags[name]!r}" if name in tags else "is not given"
            return (
                f"the tag {name} of its host {has}, and the run's selector_limits.eligible takes "
                f"{', '.join(map(repr, values))}; change one of them, a host's in its "
                "configuration, and start it anew"
            )
    return ""
