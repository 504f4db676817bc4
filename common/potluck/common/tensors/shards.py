"""Weights in several files with an index, the form in which Hugging Face's libraries write large
models.

The index `model.safetensors.index.json` is next to the shards. Its `weight_map` names the file of
each tensor (https://huggingface.co/docs/safetensors, `huggingface_hub.save_torch_state_dict`). An
index from elsewhere is checked: its files must be next to it, and each must have its tensors.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from potluck.common.errors import LayoutError, StorageError
from potluck.common.tensors.layout import Layout, quoted
from potluck.common.tensors.stored_tensors import StoredTensor, StoredTensors, picked
from potluck.common.tensors.tensor_files import (
    NamedTensors,
    TensorFile,
    Tensors,
    open_tensors,
    write_tensors,
)

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
INDEX_ENDING: Final = ".safetensors.index.json"
_MAXIMUM_INDEX_BYTES: Final = 64 << 20


@contextlib.contextmanager
def opened_weights(path: Path) -> Iterator[Tensors]:
    """Open the tensors of a .safetensors file, or of shards, while the block runs.

    path: the file, an index of shards, or a folder with either under its usual name. Raises
    LayoutError if the tensors differ from those in the index, StorageError if a file can't be read.
    """
    if path.is_dir():
        path = path / (INDEX if (path / INDEX).exists() else SINGLE)
    if not path.name.endswith(INDEX_ENDING):
        with open_tensors(path) as file:
            yield file
        return
    places = _weight_map(path)
    with contextlib.ExitStack() as stack:
        files = {
            name: stack.enter_context(open_tensors(path.with_name(name)))
            for name in sorted(set(places.values()))
        }
        yield _joined(places, files)


def write_shards(
    tensors: Tensors, folder: Path, *, shard_bytes: int, metadata: Mapping[str, str]
) -> list[Path]:
    """Write tensors as shards of at most `shard_bytes`, and their index. Return the paths of the
    files.

    A tensor that is larger than that becomes a separate shard. A model that fits into one shard
    becomes one file without an index. metadata: additional content of the index, or of the one
    file. Raises StorageError.
    """
    groups = _groups(tensors.layout, shard_bytes)
    written: list[Path] = []
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else SINGLE
        layout = Layout.place(
            [(t.name, t.dtype, t.shape) for t in tensors.layout.tensors if t.name in group]
        )
        arrays = picked(tensors.arrays, {name: name for name in group})
        write_tensors(folder / name, arrays, layout=layout, metadata=metadata)
        written.append(folder / name)
    if len(groups) > 1:
        written.append(_write_index(folder, groups, written, tensors.layout, metadata))
    return written


def _groups(layout: Layout, shard_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    room = shard_bytes
    for tensor in layout.tensors:
        size = tensor.end - tensor.begin
        if groups[-1] and size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(tensor.name)
        room -= size
    return groups


def _write_index(
    folder: Path,
    groups: list[list[str]],
    files: list[Path],
    layout: Layout,
    metadata: Mapping[str, str],
) -> Path:
    index = {
        "metadata": {"total_size": layout.data_bytes, **metadata},
        "weight_map": {
            name: file.name for group, file in zip(groups, files, strict=True) for name in group
        },
    }
    path = folder / INDEX
    try:
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"can't write {path}: {error.strerror}", path=path) from error
    return path


def _weight_map(path: Path) -> dict[str, str]:
    """Return the name of each tensor's file."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAXIMUM_INDEX_BYTES + 1)
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror}", path=path) from error
    try:
        described = json.loads(text[: _MAXIMUM_INDEX_BYTES + 1])
        places = described["weight_map"]
        if not places or not all(type(name) is str for name in places.values()):
            raise ValueError
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise LayoutError(
            f"{path} is not an index of shards; an index has a weight_map from tensor names to "
            "files",
            path=path,
        ) from None
    for name in places.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise LayoutError(
                f"{path} names the file {quoted(name)}; shards are .safetensors files next to it",
                path=path,
            )
    return dict(places)


def _joined(places: Mapping[str, str], files: Mapping[str, TensorFile]) -> NamedTensors:
    specifications: list[tuple[str, str, tuple[int, ...]]] = []
    stored: dict[str, StoredTensor] = {}
    for name, file in places.items():
        tensor = files[file].layout.by_name.get(name)
        if tensor is None:
            raise LayoutError(
                f"{files[file].path} lacks tensor {quoted(name)}, which should be in it according "
                "to the index",
                tensor=quoted(name),
            )
        specifications.append((name, tensor.dtype, tensor.shape))
        stored[name] = files[file].arrays.stored[name]
    return NamedTensors(layout=Layout.place(specifications), arrays=StoredTensors(stored))
