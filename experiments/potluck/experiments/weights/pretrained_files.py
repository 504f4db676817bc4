"""Files of weights trained elsewhere: tensors by name, nothing else."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from potluck.common.errors import ConfigurationError


def read_weights(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a .safetensors file, or of a .pth file that holds a state dict and no more.

    Raises ConfigurationError.
    """
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other pickle protocols, which are refused anyway
            state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigurationError(f"can't read {path}: {error.strerror}", path=path) from None
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(
            f"{path} is no file of plain tensors: {reason}", path=path
        ) from None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    ):
        raise ConfigurationError(f"{path} is no state dict: tensors by name", path=path)
    return {name: np.asarray(value.float().numpy()) for name, value in state.items()}
