"""Loads a run's initial weights from files, and publishes its models as files. Blocking."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from potluck.common.errors import ConfigurationError, LayoutError, StorageError
from potluck.common.run_file.runfile import RunFile
from potluck.common.tensors.encoding import EncodedUpdate, Encoding, encoded_layout, write_encoded
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import load_arrays
from potluck.common.tensors.shards import INDEX_ENDING, opened_weights
from potluck.common.tensors.stored_tensors import picked
from potluck.common.tensors.tensor_drafts import TensorDraft
from potluck.common.tensors.tensor_files import TensorFile
from potluck.server.store.model_files import ModelFiles, ModelVersion, Rendition

# Initial weights ----------------------------------------------------------------------------------


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
    default all of the network. left_out: names of tensors that the file may contain, but that are
    not loaded.

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


# Published models ---------------------------------------------------------------------------------


def publish(
    files: ModelFiles,
    run_file: RunFile,
    layout: Layout,
    arrays: Mapping[str, NDArray[Any]],
    base: ModelVersion | None,
    round_number: int,
    draft: TensorDraft | None,
) -> ModelVersion:
    """Write a model's files, in the precision in which the run sends it.

    If this precision rounds the weights, the rounded weights become the model, so that all clients
    start from the same weights. draft: a file that may already contain the model.
    """
    down = run_file.transport.down
    with_base = down.delta and base is not None
    if down.encoding is Encoding.FLOAT32 and not with_base and not down.compress:
        if draft is not None and draft.holds(arrays):
            digest = files.keep(draft)
        else:
            digest = files.write(arrays, layout)
        return files.publish(digest, [Rendition.whole(digest)])
    with contextlib.ExitStack() as stack:
        base_file = None
        if with_base and base is not None:
            base_file = stack.enter_context(files.opened(base.blake3))
        return _publish_encoded(files, run_file, layout, arrays, base_file, base, round_number)


def _publish_encoded(
    files: ModelFiles,
    run_file: RunFile,
    layout: Layout,
    arrays: Mapping[str, NDArray[Any]],
    base_file: TensorFile | None,
    base: ModelVersion | None,
    round_number: int,
) -> ModelVersion:
    down, words = run_file.transport.down, (run_file.seed, round_number)
    encoded_as = encoded_layout(layout, down.encoding)
    with files.draft(encoded_as) as encoded:
        write_encoded(
            encoded,
            arrays,
            down.encoding,
            base=None if base_file is None else base_file.arrays,
            generator=np.random.Generator(np.random.PCG64(np.random.SeedSequence(words))),
        )
        encoded_digest = files.keep(encoded)
    with (
        files.opened(encoded_digest.blake3, encoded_as) as file,
        files.draft(layout) as decoded,
    ):
        EncodedUpdate(file, layout, down.encoding, base_file).decode_to(decoded)
        digest = files.keep(decoded)
    if down.compress:
        encoded_digest = files.compress(encoded_digest)
    renditions = [
        Rendition(
            blake3=encoded_digest.blake3,
            size=encoded_digest.size,
            encoding=down.encoding,
            base_blake3="" if base_file is None or base is None else base.blake3,
            compressed=down.compress,
        )
    ]
    if base_file is not None or down.compress:
        renditions.append(Rendition.whole(digest))  # for hosts that can't use the encoded form
    return files.publish(digest, renditions)
