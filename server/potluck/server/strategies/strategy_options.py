"""Checks of the options that strategies take from a run file."""

from __future__ import annotations

import math
from collections.abc import Sequence

from potluck.common.errors import ConfigurationError


def share(name: str, value: object, *, below: float = 1.0) -> float:
    """`value` if it is a number in [0, below); else ConfigurationError."""
    found = _finite(value)
    if found is not None and 0 <= found < below:
        return found
    raise refused(name, value, f"a number in [0, {below:g})")


def positive(name: str, value: object) -> float:
    """`value` if it is a finite number > 0; else ConfigurationError."""
    found = _finite(value)
    if found is not None and found > 0:
        return found
    raise refused(name, value, "a finite number above 0")


def switch(name: str, value: object) -> bool:
    """`value` if it is true or false; else ConfigurationError."""
    if isinstance(value, bool):
        return value
    raise refused(name, value, "true or false")


def choice(name: str, value: object, choices: Sequence[str]) -> str:
    """`value` if it is one of `choices`; else ConfigurationError."""
    if isinstance(value, str) and value in choices:
        return value
    raise refused(name, value, f"one of {', '.join(choices)}")


def refused(name: str, value: object, wanted: str) -> ConfigurationError:
    """The error that says what an option must be."""
    return ConfigurationError(
        f"strategy option '{name}' is {value!r}; give {wanted}", option=name, value=value
    )


def _finite(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value)
        return found if math.isfinite(found) else None
    return None
