"""A model's state as named arrays: the form in which models are sent, stored and combined.

A model is a `torch.nn.Module`, or a dict of named arrays. Torch is imported only for modules.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import LayoutError
from potluck.common.tensors.layout import Layout, quoted
from potluck.common.tensors.stored_tensors import copied, copy_into

if TYPE_CHECKING:
    from torch import Tensor, nn

Model = Any
"""A `torch.nn.Module`, or a `dict[str, NDArray[Any]]`."""


def state_arrays(model: Model, *, only: Container[str] | None = None) -> dict[str, NDArray[Any]]:
    """Return parameters and buffers by name, in the order of `state_dict`; contiguous, on the CPU.

    only: names of the arrays to return; by default all. For a model on the CPU the arrays are
    views: copy them before the model is trained further. Raises LayoutError for a tensor that numpy
    can't represent (bfloat16, quantized, sparse).
    """
    if isinstance(model, Mapping):
        wanted = model if only is None else [name for name in model if name in only]
        return {name: _contiguous(model[name]) for name in wanted}
    arrays: dict[str, NDArray[Any]] = {}
    for name, tensor in _wanted(model, only):
        try:
            array = tensor.detach().cpu().numpy()
        except (TypeError, RuntimeError):
            raise LayoutError(
                f"the model's tensor {quoted(name)} is {tensor.dtype}, which can't be sent; keep "
                "the task's model in float32",
                tensor=quoted(name),
            ) from None
        arrays[name] = _contiguous(array)
    return arrays


def _contiguous(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).reshape(np.shape(array))


def buffer_names(model: Model) -> frozenset[str]:
    """Return the names of a model's floating-point buffers; a dict has none."""
    if isinstance(model, Mapping):
        return frozenset()
    return frozenset(name for name, tensor in model.named_buffers() if tensor.is_floating_point())


def load_arrays(
    model: Model, arrays: Mapping[str, NDArray[Any]], *, only: Container[str] | None = None
) -> None:
    """Overwrite parameters and buffers in place. arrays: may be read-only, or in a file.

    only: names of the tensors to overwrite; by default all. Raises LayoutError if names, shapes or
    types differ from the model's, which then stays unchanged. Raises StorageError if the file can't
    be read; some tensors may then be overwritten already.
    """
    layout = Layout.of(state_arrays(model, only=only))
    Layout.of(arrays).check_matches(layout, what="received", whose="task's model")
    if isinstance(model, dict):
        model.update({name: copied(arrays, name) for name in arrays})
    else:
        _load_module(model, arrays, only)


def _load_module(
    model: nn.Module, arrays: Mapping[str, NDArray[Any]], only: Container[str] | None
) -> None:
    import torch

    with torch.no_grad():
        for name, tensor in _wanted(model, only):
            if tensor.device.type == "cpu":
                copy_into(tensor.numpy(), arrays, name)  # without an intermediate copy
            else:  # torch warns of read-only memory, so one tensor at a time is copied first
                tensor.copy_(torch.from_numpy(copied(arrays, name)))


def _wanted(model: nn.Module, only: Container[str] | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        if only is None or name in only:
            yield name, tensor
