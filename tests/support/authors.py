"""Results that authors' programs return for recorded inputs, in `tests/testdata/authors`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike
from support.repository import TESTDATA

ROUNDED = 1e-6
"""Relative tolerance: the files have nine digits."""


def cases(name: str) -> list[dict[str, Any]]:
    """Return the recorded cases of a selector; numbers in lists are arrays."""
    read = json.loads((TESTDATA / "authors" / f"{name}.json").read_text())["cases"]
    assert len(read) >= 3
    return [arrays(case) for case in read]


def arrays(value: Any) -> Any:
    """Return the value with NumPy arrays in place of lists of numbers."""
    if isinstance(value, dict):
        return {key: arrays(each) for key, each in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [arrays(each) for each in value]
    return np.array(value) if isinstance(value, list) else value


def close(expected: ArrayLike) -> Any:
    """Return an object that equals the expected numbers up to the rounding of the files."""
    return pytest.approx(expected, rel=ROUNDED, abs=1e-12)
