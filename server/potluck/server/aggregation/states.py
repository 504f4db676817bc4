"""Stores the arrays of the selector's and the strategy's states in a file. Blocking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.tensors.large_arrays import empty
from potluck.server.state import State
from potluck.server.store.model_files import ModelFiles


@dataclass(frozen=True, kw_only=True)
class States:
    """The states of selector and strategy."""

    selector: State
    strategy: State


def write_states(files: ModelFiles, states: States) -> str | None:
    """Write the arrays of both states. Return the file's digest; None without arrays."""
    arrays = {
        f"{owner}/{name}": np.ascontiguousarray(array)
        for owner, state in (("selector", states.selector), ("strategy", states.strategy))
        for name, array in state.arrays.items()
    }
    return files.write(arrays).blake3 if arrays else None


def read_states(
    files: ModelFiles,
    blake3: str | None,
    selector_scalars: Mapping[str, Any],
    strategy_scalars: Mapping[str, Any],
) -> States:
    """Return both states as they were written."""
    arrays: dict[str, dict[str, NDArray[Any]]] = {"selector": {}, "strategy": {}}
    if blake3 is not None:
        files.verify(blake3)
        with files.large_arrays(), files.opened(blake3) as file:
            for name, stored in file.arrays.stored.items():
                owner, _, own_name = name.partition("/")
                arrays[owner][own_name] = array = empty(stored.shape, stored.dtype)
                stored.read_into(array)
    return States(
        selector=State(scalars=selector_scalars, arrays=arrays["selector"]),
        strategy=State(scalars=strategy_scalars, arrays=arrays["strategy"]),
    )
