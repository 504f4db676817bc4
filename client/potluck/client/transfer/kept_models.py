"""A client's whole model, for its owner: the run's tensors, and those that the client keeps.

Only reads the host's files, so it can be used while the host runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from potluck.client.base.state_directory import KEPT
from potluck.client.transfer.saved_states import SavedState, saved_states
from potluck.common.errors import ConfigurationError, LayoutError
from potluck.common.tensors.layout import quoted
from potluck.common.tensors.stored_tensors import StoredTensors
from potluck.common.tensors.tensor_files import open_tensors, write_tensors


def chosen_states(
    state_directory: Path,
    *,
    client: str | None = None,
    run: str | None = None,
    purpose: str | None = None,
) -> list[SavedState]:
    """Return the kept states in a state directory, sorted by run and client.

    The arguments are filters; None selects all. run: prefix of the run's id.
    """
    return [
        state
        for state in saved_states(state_directory / KEPT)
        if client in (None, state.client_id)
        and purpose in (None, state.purpose)
        and (run is None or state.run_id.startswith(run))
    ]


def described(state: SavedState) -> str:
    """Return one line that describes a state."""
    later = "; that of a later update is pending" if state.pending else ""
    size = state.path.stat().st_size
    return (
        f"{state.client_id}: {state.purpose}, of update {state.update_id}, {size} bytes, "
        f"{state.path}{later}"
    )


def write_whole(states: Sequence[SavedState], model: Path | None, output: Path) -> str:
    """Write a client's whole model: `model`, with a kept state's tensors in place of its own.

    Without `model`, write the kept state alone.

    Returns a line that describes what was written. Raises ConfigurationError unless there is
    exactly one state, or if `output` exists; LayoutError if a tensor has another shape or type than
    the model's; StorageError.
    """
    if output.exists():
        raise ConfigurationError(f"{output} is there already; name another file", path=output)
    if len(states) != 1:
        of = ", ".join(f"{s.client_id} in {s.run_id} ({s.purpose})" for s in states[:3])
        raise ConfigurationError(
            f"{len(states)} states fit{': ' if of else ''}{of}; name one by --client, --run and "
            "--purpose, as `potluck-client kept` lists them",
            states=len(states),
        )
    [state] = states
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(open_tensors(state.path))
        stored = dict(own.arrays.stored)
        if model is not None:
            whole = stack.enter_context(open_tensors(model))
            for name, tensor in own.layout.by_name.items():
                there = whole.layout.by_name.get(name)
                if there and (there.shape, there.dtype) != (tensor.shape, tensor.dtype):
                    raise LayoutError(
                        f"{model} is another model: its tensor {quoted(name)} has shape "
                        f"{there.shape}, the client's has {tensor.shape}",
                        path=model,
                    )
            stored = {**whole.arrays.stored, **stored}
        write_tensors(output, StoredTensors(stored), sync=True)
    what = f"{len(own.layout.tensors)} of them {state.client_id}'s own"
    return f"{output}: {len(stored)} tensors, {what}, of update {state.update_id}"
