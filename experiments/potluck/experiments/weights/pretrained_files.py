"""Reads weights of other trainings from files that contain only tensors by name."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError, LayoutError, StorageError
from potluck.common.tensors.large_arrays import copy, empty
from potluck.common.tensors.layout import TensorSpec
from potluck.common.tensors.shards import INDEX_ENDING, opened_weights


def read_weights(path: Path) -> dict[str, NDArray[Any]]:
    """Return the tensors of a .safetensors file, of shards, or of a .pth file.

    The .pth file must contain only a state dict. Floating-point tensors become float32.

    Raises ConfigurationError.
    """
    if path.is_dir() or path.name.endswith((".safetensors", INDEX_ENDING)):
        try:
            with opened_weights(path) as weights:
                return {t.name: _float32(weights.arrays[t.name], t) for t in weights.layout.tensors}
        except (LayoutError, StorageError) as error:
            raise ConfigurationError(
                f"{path} is not a file of plain tensors: {error.message}", path=path
            ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on pickle protocols that are refused anyway
            state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigurationError(f"can't read {path}: {error.strerror}", path=path) from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(
            f"{path} is not a file of plain tensors: {reason}", path=path
        ) from None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    ):
        raise ConfigurationError(f"{path} is not a state dict (tensors by name)", path=path)
    return {name: np.asarray(value.float().numpy()) for name, value in state.items()}


def _float32(array: NDArray[Any], tensor: TensorSpec) -> NDArray[Any]:
    """Return a copy as float32; tensors that are not floating-point keep their type."""
    if tensor.dtype == "BF16":
        values = empty(array.shape, np.float32)
        bits = values.view(np.uint32)
        np.copyto(bits, array)
        bits <<= 16
        return values
    if not tensor.floating:
        return copy(array)
    values = empty(array.shape, np.float32)
    np.copyto(values, array, casting="same_kind")
    return values
