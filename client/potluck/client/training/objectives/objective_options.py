"""Checks of the options that objectives take from a run file."""

from __future__ import annotations

import math
from collections.abc import Sequence

from potluck.common.errors import ConfigurationError


def number(
    objective: str,
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> float:
    """`value` if it is a finite number > above, ≥ least and ≤ most; else ConfigurationError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value)
        if math.isfinite(found) and found > above and least <= found <= most:
            return found
    bounds = [
        f"above {above:g}" if above > -math.inf else "",
        f"≥ {least:g}" if least > -math.inf else "",
        f"≤ {most:g}" if most < math.inf else "",
    ]
    wanted = " and ".join(filter(None, bounds))
    raise ConfigurationError(
        f"objective {objective}: option '{name}' is {value!r}; give a number {wanted}".rstrip(),
        option=name,
        value=value,
    )


def switch(objective: str, name: str, value: object) -> bool:
    """`value` if it is true or false; else ConfigurationError."""
    if isinstance(value, bool):
        return value
    raise ConfigurationError(
        f"objective {objective}: option '{name}' is {value!r}; give true or false",
        option=name,
        value=value,
    )


def choice(objective: str, name: str, value: object, choices: Sequence[str]) -> str:
    """`value` if it is one of `choices`; else ConfigurationError."""
    if isinstance(value, str) and value in choices:
        return value
    raise ConfigurationError(
        f"objective {objective}: option '{name}' is {value!r}; give one of {', '.join(choices)}",
        option=name,
        value=value,
    )
