"""Files of auxiliaries: tensors in addition to the model, read before a training, written after it.

All functions block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from potluck.client.correction import LocalCorrection, NamedAuxiliaries
from potluck.client.training.steps.loop import Corrected
from potluck.common.errors import LayoutError, PluginError
from potluck.common.tensors.auxiliary import (
    PREFIX,
    auxiliary_of,
    joined,
    zero_auxiliary,
)
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.stored_tensors import copied
from potluck.common.tensors.tensor_files import open_tensors, write_tensors

Arrays = Mapping[str, Mapping[str, NDArray[np.float32]]]


@dataclass(frozen=True, kw_only=True)
class ReceivedAuxiliaries:
    """The auxiliaries that the coordinator sends for a training.

    names: names of the auxiliaries. shared, personal: files from the coordinator, for all clients
    and for this one; personal may be None. kept: file that the client wrote after its last training
    whose update became part of the model; None if there is no such training.
    """

    names: Sequence[str]
    shared: Path
    personal: Path | None
    kept: Path | None


def corrected(
    correction: LocalCorrection, received: ReceivedAuxiliaries, layout: Layout
) -> Corrected:
    """Return the correction with its tensors, read from files. Raises LayoutError, StorageError."""
    return Corrected(
        correction=correction,
        shared=_read(received.shared, received.names, layout),
        personal={} if received.personal is None else _read(received.personal, None, layout),
        kept=None if received.kept is None else _read_kept(received.kept),
        layout=layout,
    )


def sendable(send: NamedAuxiliaries, names: Sequence[str], layout: Layout) -> Arrays:
    """Return the tensors that a correction sends, in the model's layout; missing tensors become
    zeros.

    Raises PluginError if the correction sends auxiliaries other than `names`, or a tensor that is
    not in `layout`.
    """
    if set(send) != set(names):
        raise PluginError(
            f"the correction sends {', '.join(sorted(send)) or 'nothing'}, but the strategy "
            f"expects {', '.join(sorted(names))}"
        )
    return {name: _filled(send[name], layout) for name in names}


def write_kept(keep: NamedAuxiliaries, path: Path) -> None:
    """Write kept auxiliaries, tensors of any names and shapes. Raises StorageError."""
    arrays = {
        name: {tensor: _array(values) for tensor, values in tensors.items()}
        for name, tensors in keep.items()
    }
    write_tensors(path, joined(arrays), sync=True)


def _array(tensor: torch.Tensor) -> NDArray[np.float32]:
    array = tensor.detach().float().cpu().numpy()
    return np.ascontiguousarray(array).reshape(array.shape)


def _read_kept(path: Path) -> NamedAuxiliaries:
    """Return the tensors that `write_kept` wrote, on the CPU."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    with open_tensors(path) as file:
        for name in file.arrays:
            auxiliary, _, tensor = name.removeprefix(PREFIX).partition("/")
            found.setdefault(auxiliary, {})[tensor] = torch.from_numpy(copied(file.arrays, name))
    return found


def _filled(tensors: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, NDArray[np.float32]]:
    arrays: dict[str, NDArray[np.float32]] = dict(zero_auxiliary(layout))
    for name, tensor in tensors.items():
        array = _array(tensor)
        if name not in arrays or arrays[name].shape != array.shape:
            raise PluginError(
                f"the correction returned tensor '{name}' of shape {array.shape}, but the model "
                "has no such tensor"
            )
        arrays[name] = array
    return arrays


def _read(path: Path, names: Sequence[str] | None, layout: Layout) -> NamedAuxiliaries:
    """Return the named auxiliaries of a file, or all of them, as tensors on the CPU."""
    with open_tensors(path) as file:
        found = sorted({t.name.split("/")[1] for t in file.layout.tensors if t.name.count("/") > 1})
        auxiliaries: dict[str, dict[str, torch.Tensor]] = {}
        for name in found if names is None else names:
            if name not in found and layout.parameters:
                raise LayoutError(f"the file of auxiliary tensors lacks '{name}'")
            arrays = auxiliary_of(file, name, layout).arrays
            auxiliaries[name] = {n: torch.from_numpy(copied(arrays, n)) for n in arrays}
    return auxiliaries
