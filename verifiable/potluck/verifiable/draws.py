"""Selections that hosts can recompute: uniform and round-robin.

They depend on the seed, the round, the available clients and numbers in the run's chain. This
module implements them a second time, independent of the selectors' code; tests compare both
implementations.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np

UNIFORM: Final = "uniform"
ROUND_ROBIN: Final = "round-robin"

RECOMPUTED: Final = (UNIFORM, ROUND_ROBIN)
"""Names of the selectors whose choice a host can recompute."""


def needs_times(selector: str) -> bool:
    """Return whether a selector depends on the number of earlier selections of each client."""
    return selector == ROUND_ROBIN


def drawn(
    selector: str,
    *,
    seed: int,
    round_number: int,
    count: int,
    available: Sequence[str],
    times: Sequence[int] | None = None,
) -> tuple[str, ...]:
    """Return the cohort that a selector chooses, in the selector's order.

    available: clients to choose from, in roster order. times: number of earlier selections of each
    client, for round-robin. Raises ValueError for other selectors.
    """
    words = (seed, round_number, zlib.crc32(selector.encode()))
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
    size = min(count, len(available))
    if selector == UNIFORM:
        chosen = generator.choice(len(available), size=size, replace=False)
    elif selector == ROUND_ROBIN and times is not None:
        shuffled = generator.permutation(len(available))
        chosen = shuffled[np.argsort(np.array(times)[shuffled], kind="stable")[:size]]
    else:
        raise ValueError(f"selector '{selector}' can't be recomputed by hosts")
    return tuple(available[position] for position in map(int, chosen))
