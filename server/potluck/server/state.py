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

    def apart(self) -> State:
        """The same without views of arrays that are somebody else's, who may write over them."""
        arrays = {
            name: array if array.flags.owndata else array.copy()
            for name, array in self.arrays.items()
        }
        return State(scalars=self.scalars, arrays=arrays)
