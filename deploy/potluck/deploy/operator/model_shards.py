"""A run's model as shards, in a folder."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.tensors.shards import write_shards
from potluck.common.tensors.tensor_files import open_tensors
from potluck.deploy.operator.model_download import DownloadedModel

_UNITS: Mapping[str, int] = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_WHOLE = "whole.safetensors"


def shard_bytes(text: str) -> int:
    """Return a size such as 5GB or 500MB in bytes. Raises ConfigurationError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]?)b?", text.strip().lower())
    size = 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
    if size < 1:
        raise ConfigurationError(
            f"'{text}' is not a size; give one such as 5GB or 500MB", size=text
        )
    return size


def whole_file(folder: Path) -> Path:
    """Make the folder, and return the path in it for the model before it is split.

    Raises ConfigurationError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"can't make the folder {folder}: {error.strerror}; name another", path=folder
        ) from error
    return folder / _WHOLE


async def split(
    downloaded: DownloadedModel, metadata: Mapping[str, str], size: int
) -> DownloadedModel:
    """Replace a downloaded model by shards in the same folder.

    size: maximum bytes per shard. Return a record whose path is the folder. Raises LayoutError,
    StorageError.
    """
    folder = downloaded.path.parent

    def work() -> int:
        with open_tensors(downloaded.path) as file:
            written = write_shards(file, folder, shard_bytes=size, metadata=metadata)
        try:
            downloaded.path.unlink()
            return sum(path.stat().st_size for path in written)
        except OSError as error:
            raise StorageError(f"can't read {folder}: {error.strerror}", path=folder) from error

    return replace(downloaded, path=folder, size=await asyncio.to_thread(work))
