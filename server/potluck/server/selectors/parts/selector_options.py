"""Checks of the options that selectors take from a run file or a command line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from potluck.common.errors import ConfigurationError


def choice(name: str, value: object, choices: Sequence[str]) -> str:
    """`value` if it is one of `choices`; else ConfigurationError."""
    if isinstance(value, str) and value in choices:
        return value
    raise _refused(name, value, f"one of {', '.join(choices)}")


def whole(name: str, value: object, *, minimum: int) -> int:
    """`value` if it is an integer ≥ minimum; else ConfigurationError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
        return value
    raise _refused(name, value, f"a whole number ≥ {minimum}")


def not_negative(name: str, value: object) -> float:
    """`value` if it is a finite number ≥ 0; else ConfigurationError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and number >= 0:
            return number
    raise _refused(name, value, "a number ≥ 0")


def within(name: str, value: object, low: float, high: float) -> float:
    """`value` if it is a number in [low, high]; else ConfigurationError."""
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    raise _refused(name, value, f"a number in [{low:g}, {high:g}]")


def switch(name: str, value: object) -> bool:
    """`value` if it is true or false; else ConfigurationError."""
    if isinstance(value, bool):
        return value
    raise _refused(name, value, "true or false")


def _refused(name: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"selector option '{name}' is {value!r}; give {wanted}", option=name, value=value
    )
