"""The state that selectors and strategies keep between rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.tensors.large_arrays import copy

Scalar = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class State:
    """JSON scalars and named arrays, which are stored at each commit and so survive a kill.

    Treat a state as immutable: return a new State instead of changing an existing one.
    """

    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def apart(self, *others: Mapping[str, NDArray[Any]]) -> State:
        """Return this state, with copies of arrays that share memory with `others`.

        The memory of `others` may be overwritten.
        """
        theirs = {_memory(array) for each in others for array in each.values()}
        arrays = {
            name: copy(array) if _memory(array) in theirs else array
            for name, array in self.arrays.items()
        }
        return State(scalars=self.scalars, arrays=arrays)


def _memory(array: NDArray[Any]) -> int:
    """Return the identity of the object whose memory an array uses: the array itself, or the one
    that it is a view of."""
    holder: Any = array
    while isinstance(holder, np.ndarray) and holder.base is not None:
        holder = holder.base
    return id(holder.obj if isinstance(holder, memoryview) else holder)
