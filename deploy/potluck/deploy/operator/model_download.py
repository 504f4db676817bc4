"""Downloads a run's model, verifies it, and resumes where an earlier download stopped.

The received part of FILE is stored next to it as `.FILE.BLAKE3.part`. The digest in the name makes
sure that a download only resumes from bytes of the same model.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC
from functools import cached_property
from pathlib import Path
from typing import Any

from potluck.common.errors import (
    ConfigurationError,
    LayoutError,
    PotluckError,
    ProtocolError,
    StorageError,
    TransferError,
    TruncatedError,
    UnreachableError,
)
from potluck.common.net.transfer import FileReceiver, check_digest, held_bytes, part_path, verified
from potluck.common.records.round_message import round_of
from potluck.common.run_file.runfile import RunFile, parse_run_file, stored_values
from potluck.common.tensors.layout import ALIGNMENT, LENGTH_BYTES
from potluck.common.tensors.shards import write_shards
from potluck.common.tensors.tensor_files import open_tensors
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.rpc.v1 import operator_pb2, transfer_pb2

# Metadata -----------------------------------------------------------------------------------------
# Metadata are in the file's safetensors header under `__metadata__`, which programs that load the
# file ignore. The coordinator's own files have no metadata: they are named by their digests, and
# equal models must have equal names.

_TABLES = ("task", "model", "selector", "strategy", "objective", "training")
_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


def write_metadata(path: Path, metadata: Mapping[str, str]) -> int:
    """Write metadata into the header of a safetensors file. Return the file's new size in bytes.

    The tensors stay as they are. Raises LayoutError if it is not a safetensors file, StorageError
    if it can't be written; after an error, the file is unchanged.
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


# Downloads ----------------------------------------------------------------------------------------

ATTEMPTS = 5
"""Number of consecutive failures without a new byte after which a download gives up."""

_FIRST_PAUSE_SECONDS = 0.05
_LARGEST_FILE = 1 << 62  # no limit: operators trust their coordinator
_DIGEST_DIGITS = 64

Progress = Callable[[int, int], None]
"""Function that is called with the number of bytes received so far, and of all bytes."""


@dataclass(frozen=True, kw_only=True)
class DownloadedModel:
    """A complete, verified file. blake3: the digest of the coordinator's file, by which the
    coordinator identifies the model.

    origin: the model's origin; empty if the coordinator did not send it.
    """

    path: Path
    blake3: str
    size: int
    origin: operator_pb2.ModelOrigin

    @cached_property
    def run_file(self) -> RunFile:
        """The run's file, parsed. Raises ConfigurationError if this release refuses the file."""
        return parse_run_file(self.origin.run_file, source="the run's file")

    @cached_property
    def _values(self) -> Mapping[str, Any]:
        return stored_values(self.origin.run_file)

    @property
    def kept_patterns(self) -> list[str]:
        """Name patterns of the tensors that clients keep; a run's models lack these tensors."""
        return [str(pattern) for pattern in self._values.get("model", {}).get("keep", ())]

    def metadata(self) -> dict[str, str]:
        """Return the metadata for a model file; tables of the run file are JSON texts."""
        origin, values = self.origin, self._values
        metadata = {
            "run": origin.run_id,
            "name": origin.name,
            "round": str(origin.round),
            "blake3": self.blake3,
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
        metadata["seed"] = str(values.get("seed", 0))
        tables = {name: values[name] for name in _TABLES if name in values}
        metadata |= {name: json.dumps(table, default=str) for name, table in tables.items()}
        # Hugging Face's libraries refuse a file whose metadata don't name the tensors' framework.
        return {"format": "pt", **{f"potluck.{name}": text for name, text in metadata.items()}}


async def download_model(
    client: OperatorClient,
    run_id: str,
    path: Path,
    *,
    round_number: int = 0,
    best: bool = False,
    progress: Progress | None = None,
    describe: bool = False,
) -> DownloadedModel:
    """Download a run's model to `path`; `round_number` 0 stands for the last committed round.

    best: download the run's best model instead; the origin then describes that model. describe:
    write the origin into the file, as its metadata.

    A broken transfer is resumed until it breaks `ATTEMPTS` times in a row without progress. The
    received part is kept, and the next call resumes from it. Raises ConfigurationError or
    StorageError if `path` can't be written, and the errors of `OperatorClient`.
    """
    _check_target(path)
    if best and round_number:
        raise ConfigurationError(
            f"round {round_number} and the best model are both requested; request only one"
        )
    fruitless, before = 0, _bytes_here(path)
    while True:
        try:
            return await _receive(
                client, run_id, path, round_number, progress, describe=describe, best=best
            )
        except (TransferError, UnreachableError) as error:
            here = _bytes_here(path)
            fruitless = 0 if here > before else fruitless + 1
            before = here
            if not here:
                raise
            if fruitless == ATTEMPTS:
                raise _stopped(error, path, here) from error
        except OSError as error:
            cause = error.strerror or type(error).__name__
            raise StorageError(
                f"can't write {path}: {cause}; free disk space, or name a file in another folder",
                path=path,
            ) from error
        if fruitless:
            await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2**fruitless)


def _stopped(error: PotluckError, path: Path, here: int) -> PotluckError:
    """Return the error of a download that gives up, with the number of bytes already received."""
    folder = path.absolute().parent
    return type(error)(
        f"{error.message}; {here} bytes of the file are in {folder}, and the same command resumes "
        "the download",
        **error.metadata,
    )


def _bytes_here(path: Path) -> int:
    """Return the size in bytes of the received part, from which the next call resumes."""
    return next((held_bytes(part) for part in _partial_files(path).values()), 0)


def _check_target(path: Path) -> None:
    if path.is_dir():
        raise ConfigurationError(
            f"can't write the file {path}, because it is a folder; name a file in it", path=path
        )
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(
            f"can't write the file {path}; name a file in a folder that exists", path=path
        )


async def _receive(
    client: OperatorClient,
    run_id: str,
    path: Path,
    round_number: int,
    progress: Progress | None,
    *,
    describe: bool,
    best: bool,
) -> DownloadedModel:
    held = _partial_files(path)
    blake3 = next(iter(held), "")
    offset = held_bytes(held[blake3]) if blake3 else 0
    answers = client.fetch_model(
        run_id, round_number=round_number, blake3=blake3, offset=offset, best=best
    )
    async with aclosing(answers):
        first = await anext(answers, None)
        if first is None or first.frame.WhichOneof("part") != "header":
            raise ProtocolError(
                "the coordinator's answer does not begin with the header of a model"
            )
        header, origin = first.frame.header, first.origin
        if best and not origin.HasField("best"):
            raise ProtocolError(
                "the coordinator's release does not support best models; upgrade the "
                "coordinator, or request a round"
            )
        target = _hidden(path, check_digest(header.blake3))
        receiver = FileReceiver(
            target,
            blake3=header.blake3,
            size=header.size,
            offset=header.offset,
            maximum=_LARGEST_FILE,
        )
        try:
            async for answer in answers:
                if _take(receiver, answer.frame):
                    await verified(receiver, answer.frame.trailer.blake3)
                    break
                if progress is not None:
                    progress(receiver.received, header.size)
            else:
                raise TruncatedError(
                    f"the download ended early: {receiver.received} of {header.size} bytes of the "
                    "model arrived"
                )
        finally:
            receiver.close()
    model = DownloadedModel(path=path, blake3=header.blake3, size=header.size, origin=origin)
    if describe and origin.run_id:
        size = await asyncio.to_thread(write_metadata, target, model.metadata())
        model = replace(model, size=size)
    target.replace(path)
    for leftover in _partial_files(path).values():
        part_path(leftover).unlink(missing_ok=True)
    return model


def _take(receiver: FileReceiver, frame: transfer_pb2.ModelFrame) -> bool:
    """Process a received frame. Return True if the file is now complete."""
    match frame.WhichOneof("part"):
        case "chunk":
            receiver.write(frame.chunk)
            return False
        case "trailer":
            return True
        case other:
            raise ProtocolError(
                f"the coordinator sent {other or 'nothing'} in the middle of a file, where bytes "
                "of the file were expected"
            )


def _hidden(path: Path, blake3: str) -> Path:
    return path.with_name(f".{path.name}.{blake3}")


def _partial_files(path: Path) -> dict[str, Path]:
    """Return partially received files by BLAKE3 digest, the latest first."""
    start, end = f".{path.name}.", ".part"
    parts = [
        part
        for part in path.absolute().parent.iterdir()
        if part.name.startswith(start)
        and part.name.endswith(end)
        and len(part.name) == len(start) + _DIGEST_DIGITS + len(end)
    ]
    parts.sort(key=lambda part: part.stat().st_mtime, reverse=True)
    return {
        part.name[len(start) : -len(end)]: part.with_name(part.name.removesuffix(end))
        for part in parts
    }


# Shards -------------------------------------------------------------------------------------------

_UNITS: Mapping[str, int] = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_WHOLE = "whole.safetensors"


def shard_bytes(text: str) -> int:
    """Return a size such as 5GB or 500MB in bytes. Raises ConfigurationError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]?)b?", text.strip().lower())
    size = 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
    if size < 1:
        raise ConfigurationError(
            f"{text!r} is not a size; write a size such as 5GB or 500MB", size=text
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
            f"can't create the folder {folder}: {error.strerror}; name another folder", path=folder
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
