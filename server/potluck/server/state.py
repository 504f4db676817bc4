"""What selectors and strategies remember between rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

Scalar = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class State:
    """JSON scalars and named arrays, nothing else: stored at commit, so it survives a kill.

    Treat both as immutable; return a new State instead of changing one.
    """

    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
