"""A model's state as named arrays: what travels, what is stored, what is combined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from potluck.common.errors import LayoutError
from potluck.common.tensors.layout import Layout, quoted


def state_arrays(model: nn.Module) -> dict[str, NDArray[Any]]:
    """Parameters and buffers by name, in the order of `state_dict`; contiguous, on the CPU.

    For a model on the CPU they are views: whoever goes on training must copy them first.
    Raises LayoutError for a tensor that numpy can't hold (bfloat16, quantized, sparse).
    """
    arrays: dict[str, NDArray[Any]] = {}
    for name, tensor in model.state_dict().items():
        try:
            array = tensor.detach().cpu().numpy()
        except (TypeError, RuntimeError):
            raise LayoutError(
                f"the model's tensor {quoted(name)} is {tensor.dtype}, which can't be sent; keep "
                "the task's model in float32",
                tensor=quoted(name),
            ) from None
        arrays[name] = np.ascontiguousarray(array).reshape(array.shape)
    return arrays


def buffer_names(model: nn.Module) -> frozenset[str]:
    """The floating-point tensors of a model's state that are no parameters."""
    return frozenset(name for name, tensor in model.named_buffers() if tensor.is_floating_point())


def load_arrays(model: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Overwrites parameters and buffers in place; `arrays` may be read-only.

    Raises LayoutError, and leaves the model as it was, unless names, shapes and types are its own.
    """
    layout = Layout.of(state_arrays(model))
    Layout.of(arrays).check_matches(layout, what="received", whose="task's model")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.device.type == "cpu":
                np.copyto(tensor.numpy(), arrays[name])  # straight from the mapped file
            else:  # torch warns of read-only memory, so one tensor at a time is copied first
                tensor.copy_(torch.from_numpy(np.array(arrays[name])))
