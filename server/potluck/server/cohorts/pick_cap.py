"""Who of the available clients may be selected: nobody too often, whatever a profile says. Pure."""

from __future__ import annotations

import math

import numpy as np

from potluck.server.cohorts.lopsidedness import Picks, below_cap
from potluck.server.selection import Rows


def cap_on_picks(maximum_share: float, round_number: int) -> int:
    """Picks a client may have after a round: ⌈share · round⌉."""
    return math.ceil(maximum_share * round_number - 1e-9)


def under_cap(available: Rows, picks: Picks, *, cap: int, count: int) -> Rows:
    """Those of `available` that one more pick leaves within `cap`, sorted (picks: K, by row).

    Where they are fewer than `count`, those picked least make it up, lower rows first.
    """
    kept = below_cap(available, picks, cap)
    missing = min(count, len(available)) - len(kept)
    if missing > 0:
        others = np.setdiff1d(available, kept)  # all known: who has joined since is never capped
        least = others[np.argsort(picks[others], kind="stable")][:missing]
        kept = np.concatenate([kept, least])
    return np.sort(kept)
