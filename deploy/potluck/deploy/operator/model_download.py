"""Downloads of a run's model. They are verified, and resume where an earlier download stopped.

The received part of FILE is stored next to it as `.FILE.BLAKE3.part`. So a download only resumes
from bytes of the same model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from potluck.common.errors import (
    ConfigurationError,
    PotluckError,
    ProtocolError,
    TransferError,
    TruncatedError,
    UnreachableError,
)
from potluck.common.net.transfer import FileReceiver, check_digest, held_bytes, part_path, verified
from potluck.deploy.operator.model_metadata import metadata_of, write_metadata
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.rpc.v1 import operator_pb2, transfer_pb2

ATTEMPTS = 5
"""Number of consecutive failures without a new byte after which a download gives up."""

_FIRST_PAUSE_SECONDS = 0.05
_LARGEST_FILE = 1 << 62  # no limit: operators trust their coordinator
_DIGEST_DIGITS = 64

Progress = Callable[[int, int], None]
"""Called with the number of received bytes and of all bytes."""


@dataclass(frozen=True, kw_only=True)
class DownloadedModel:
    """A complete, verified file. blake3: the digest of the coordinator's file.

    origin: the model's origin; empty if the coordinator did not send it.
    """

    path: Path
    blake3: str
    size: int
    origin: operator_pb2.ModelOrigin


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
    """Fetch the model of a run into `path`; `round_number` 0 stands for the last committed round.

    best: fetch the run's best model instead; the origin then describes it. describe: write the
    origin into the file; see `model_metadata`.

    A broken transfer is resumed until it breaks `ATTEMPTS` times in a row without progress. The
    received part is kept, and the next call resumes from it. Raises ConfigurationError if `path`
    can't be written, and the errors of `OperatorClient`.
    """
    _check_target(path)
    if best and round_number:
        raise ConfigurationError(
            f"round {round_number} and the best model are both requested; request one of them"
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
        if fruitless:
            await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2**fruitless)


def _stopped(error: PotluckError, path: Path, here: int) -> PotluckError:
    """Return the error of a download that gives up, with the number of bytes already received."""
    folder = path.absolute().parent
    return type(error)(
        f"{error.message}; {here} bytes are in {folder}, and the same command resumes there",
        **error.metadata,
    )


def _bytes_here(path: Path) -> int:
    """Return the size in bytes of the received part, from which the next call resumes."""
    return next((held_bytes(part) for part in _partial_files(path).values()), 0)


def _check_target(path: Path) -> None:
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise ConfigurationError(
            f"can't write {path}: name a file in a folder that exists", path=path
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
            raise ProtocolError("the coordinator sent a model that does not begin with its header")
        header, origin = first.frame.header, first.origin
        if best and not origin.HasField("best"):
            raise ProtocolError(
                "the coordinator's release is too old for best models; upgrade it, or request a "
                "round"
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
                    f"{receiver.received} of {header.size} bytes of the model arrived"
                )
        finally:
            receiver.close()
    size = header.size
    if describe and origin.run_id:
        size = await asyncio.to_thread(write_metadata, target, metadata_of(origin, header.blake3))
    target.replace(path)
    for leftover in _partial_files(path).values():
        part_path(leftover).unlink(missing_ok=True)
    return DownloadedModel(path=path, blake3=header.blake3, size=size, origin=origin)


def _take(receiver: FileReceiver, frame: transfer_pb2.ModelFrame) -> bool:
    """Process a frame. Return True if the file is complete with it."""
    match frame.WhichOneof("part"):
        case "chunk":
            receiver.write(frame.chunk)
            return False
        case "trailer":
            return True
        case other:
            raise ProtocolError(
                f"the coordinator sent {other or 'nothing'} in the middle of a file"
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
