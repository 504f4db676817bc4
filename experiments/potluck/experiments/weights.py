"""Adapts weights that were trained elsewhere to a model.

Imports `potluck.common` only. Input: files of weights. Output: arrays.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError, LayoutError, StorageError
from potluck.common.tensors.large_arrays import copy, empty
from potluck.common.tensors.layout import TensorSpec
from potluck.common.tensors.shards import INDEX_ENDING, opened_weights

# Files --------------------------------------------------------------------------------------------


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
            warnings.simplefilter("ignore")  # about pickle protocols that are refused anyway
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


# Adaptation ---------------------------------------------------------------------------------------
# Pure functions.
#
# torchvision's networks and Potluck's compute the same except for normalisation: torchvision
# normalises over batches, Potluck over groups of channels. So a batch normalisation's learned
# values (scale and shift) are kept, and its statistics (running means and variances) are dropped.

Arrays = Mapping[str, NDArray[Any]]

_COUNTED = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A model's tensors by name.

    fresh: names of tensors that keep their initial values, since the weights have no tensor of that
    shape (usually the last layer, because of other classes). dropped: names of weights that the
    model does not use.
    """

    arrays: dict[str, NDArray[Any]]
    fresh: list[str]
    dropped: list[str]


def fitted(weights: Arrays, model: Arrays) -> Fitted:
    """Return the model's tensors with values from `weights`; missing ones stay initial.

    model: the initial tensors. weights: may have Potluck's names, or torchvision's of MobileNetV2
    and ResNets. Raises LayoutError, with the name, if a tensor outside the last layer is missing.
    """
    renamed = torchvision_names(weights)
    names = {renamed.get(name, name): name for name in weights}
    arrays: dict[str, NDArray[Any]] = {}
    fresh: list[str] = []
    for name, made in model.items():
        given = weights[names[name]] if name in names else None
        if given is not None and given.shape == made.shape:
            arrays[name] = np.ascontiguousarray(given, dtype=made.dtype)
        else:
            arrays[name] = made
            fresh.append(name)
    _check(weights, names, model, fresh)
    dropped = [source for name, source in names.items() if name not in model]
    return Fitted(arrays=arrays, fresh=fresh, dropped=dropped)


def _check(weights: Arrays, names: Mapping[str, str], model: Arrays, fresh: list[str]) -> None:
    last = list(model)[-1].rpartition(".")[0]
    for name in fresh:
        if name.rpartition(".")[0] != last:
            given = weights[names[name]].shape if name in names else None
            what = "is missing" if given is None else f"has shape {given}"
            raise LayoutError(
                f"the weights are not compatible with the model: '{name}' {what}, but "
                f"{model[name].shape} is expected; name the model with which the weights were "
                "trained",
                tensor=name,
            )


def torchvision_names(weights: Arrays) -> dict[str, str]:
    """Return Potluck's names by torchvision's, for MobileNetV2 and ResNets."""
    if any(name.startswith("layer1.") for name in weights):
        return _resnet(weights)
    return {
        name: re.sub(r"^features\.", "layers.", name).replace(".conv.", ".residual.")
        for name in weights
        if not name.endswith(_COUNTED)
    }


def _resnet(weights: Arrays) -> dict[str, str]:
    """Return Potluck's names for conv1, bn1, layerL.B.convN, bnN, downsample and fc."""
    blocks = sorted(
        {(int(found[1]), int(found[2])) for name in weights if (found := _BLOCK.match(name))}
    )
    stage = {block: number for number, block in enumerate(blocks)}
    renamed = {}
    for name in weights:
        if name.endswith(_COUNTED):
            continue
        new = re.sub(r"^conv1\.", "stem.0.", name)
        new = re.sub(r"^bn1\.", "stem.1.", new)
        new = re.sub(r"^fc\.", "classifier.", new)
        if found := _BLOCK.match(name):
            number = stage[int(found[1]), int(found[2])]
            rest = name[found.end() :].replace("downsample.", "shortcut.")
            rest = re.sub(r"^conv(\d)", lambda m: f"residual.{3 * int(m[1]) - 3}", rest)
            rest = re.sub(r"^bn(\d)", lambda m: f"residual.{3 * int(m[1]) - 2}", rest)
            new = f"stages.{number}.{rest}"
        renamed[name] = new
    return renamed


_BLOCK = re.compile(r"layer(\d+)\.(\d+)\.")
