"""Settings by which clients convert updates to integers, so that hosts can add them up."""

from __future__ import annotations

from potluck.common.disclosure import Weighting
from potluck.common.run_file.runfile import RunFile
from potluck.common.updates.lanes import LARGEST_WEIGHT, LaneTerms
from potluck.server.strategy import Strategy, Summation


def lane_terms(run_file: RunFile, strategy: Strategy) -> LaneTerms:
    """Return how clients convert updates to integers and weight them, which is the same in all
    rounds."""
    alike = run_file.weighting is Weighting.EQUAL or strategy.summation is Summation.EQUAL
    cap = 1 if alike else run_file.sample_limits.maximum or LARGEST_WEIGHT
    sums = run_file.host_sums
    return LaneTerms(
        quantum_bits=sums.quantum_bits,
        weight_unit=1 if alike else sums.weight_unit,
        weight_cap=min(cap, LARGEST_WEIGHT),
    )
