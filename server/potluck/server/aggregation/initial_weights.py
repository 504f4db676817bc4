"""Loads the initial weights of a run from a file."""

from __future__ import annotations

from collections.abc import Collection, Container
from pathlib import Path

from torch import nn

from potluck.common.errors import ConfigurationError, LayoutError, StorageError
from potluck.common.tensors.model_arrays import load_arrays
from potluck.common.tensors.shards import INDEX_ENDING, opened_weights
from potluck.common.tensors.stored_tensors import picked


def load_weights(
    network: nn.Module,
    name: str,
    data: Path | None,
    *,
    only: Container[str] | None = None,
    left_out: Collection[str] = (),
) -> None:
    """Overwrite a network's weights with those of a file, or of several shards, in the data
    directory.

    name: path in the data directory. only: names of the tensors to load, which must exist; by
    default all of the network. left_out: names of tensors that the file may have and that are not
    loaded.

    Raises ConfigurationError if the file does not exist or is outside the directory, and
    LayoutError, naming the tensor, if the file is of another model.
    """
    if data is None:
        raise ConfigurationError(
            f"initial_model is '{name}', but the coordinator has no data directory; set "
            "data_directory in its configuration file",
            name=name,
        )
    path = (data / name).resolve()
    of_tensors = path.is_dir() or path.name.endswith((".safetensors", INDEX_ENDING))
    if not path.is_relative_to(data.resolve()) or not of_tensors:
        raise ConfigurationError(
            f"initial_model must name a .safetensors file, the index of several or their folder, "
            f"in the coordinator's data directory {data}, got '{name}'",
            name=name,
        )
    if not path.exists():
        raise ConfigurationError(
            f"initial_model: {path} does not exist; create it with `potluck pretrained`", path=path
        )
    try:
        with opened_weights(path) as file:
            arrays = file.arrays
            if left_out:
                arrays = picked(arrays, {n: n for n in arrays if n not in left_out})
            load_arrays(network, arrays, only=only)
    except (LayoutError, StorageError) as error:
        raise LayoutError(f"initial_model: {path}: {error.message}", path=path) from None
