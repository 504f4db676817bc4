"""Metadata of model files: the run, the task, the round.

They are in the file's safetensors header under `__metadata__`, which programs that load the file
ignore. The coordinator's own files have no metadata: they are named by their digests, and equal
models must have equal names.
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Mapping
from datetime import UTC
from pathlib import Path

from potluck.common.errors import LayoutError, StorageError
from potluck.common.records.round_message import round_of
from potluck.common.tensors.layout import ALIGNMENT, LENGTH_BYTES
from potluck.rpc.v1 import operator_pb2

_TABLES = ("task", "model", "selector", "strategy", "objective", "training")
_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


def metadata_of(origin: operator_pb2.ModelOrigin, blake3: str) -> dict[str, str]:
    """Return the metadata for a model file; tables of the run file are JSON texts.

    blake3: the digest of the file without metadata, by which the coordinator identifies the model.
    """
    metadata = {
        "run": origin.run_id,
        "name": origin.name,
        "round": str(origin.round),
        "blake3": blake3,
    }
    if origin.HasField("committed"):
        committed = round_of(origin.committed)
        metadata["measures"] = json.dumps(dict(sorted(committed.measures.items())))
        coverage = {name: vars(each) for name, each in committed.coverage.items()}
        metadata["coverage"] = json.dumps(coverage)
        metadata["software"] = json.dumps(committed.software)
        at = origin.committed.committed_at.ToDatetime(tzinfo=UTC)
        metadata["committed_at"] = at.isoformat()
    if origin.HasField("best"):
        metadata["best_of"] = origin.best.measure
    values = tomllib.loads(origin.run_file)
    metadata["seed"] = str(values.get("seed", 0))
    metadata |= {name: json.dumps(values[name], default=str) for name in _TABLES if name in values}
    # Hugging Face's libraries refuse a file whose metadata don't name the tensors' framework.
    return {"format": "pt", **{f"potluck.{name}": text for name, text in metadata.items()}}


def kept_patterns(origin: operator_pb2.ModelOrigin) -> list[str]:
    """Return patterns of the tensors that clients keep; the run's models don't contain these."""
    table = tomllib.loads(origin.run_file).get("model", {})
    return [str(pattern) for pattern in table.get("keep", ())]


def write_metadata(path: Path, metadata: Mapping[str, str]) -> int:
    """Write metadata into the header of a safetensors file. Return the file's new size in bytes.

    The tensors stay as they are. Raises LayoutError if it is not a safetensors file, StorageError
    if it can't be written; the file is unchanged then.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        with path.open("rb") as source, new.open("wb") as target:
            length = int.from_bytes(source.read(LENGTH_BYTES), "little")
            if length > min(_MOST_HEADER_BYTES, path.stat().st_size):
                raise LayoutError(f"{path} is not a safetensors file", path=path)
            header = json.loads(source.read(length))
            header["__metadata__"] = {**header.get("__metadata__", {}), **metadata}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % ALIGNMENT)
            target.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
            size = target.tell()
        new.replace(path)
        return size
    except (ValueError, AttributeError, TypeError):
        raise LayoutError(f"{path} is not a safetensors file", path=path) from None
    except OSError as error:
        raise StorageError(f"can't write {new}: {error.strerror}", path=new) from error
    finally:
        new.unlink(missing_ok=True)
