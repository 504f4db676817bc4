"""Compresses files with Zstandard, level 1.

On slow networks, compressed deltas arrive a third faster.
"""

from __future__ import annotations

from pathlib import Path

import zstandard

from potluck.common.errors import LayoutError, StorageError, TooLargeError
from potluck.common.tensors.tensor_files import FileDigest, file_digest

_LEVEL = 1  # higher levels save almost nothing on weights and take several times as long
_PIECE_BYTES = 1 << 20


def compress_file(source: Path, target: Path) -> FileDigest:
    """Compress the file `source` into `target`. Raises StorageError if the disk fails."""
    temporary = target.with_name(target.name + ".new")
    try:
        with source.open("rb") as plain, temporary.open("wb") as packed:
            zstandard.ZstdCompressor(level=_LEVEL).copy_stream(plain, packed)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"can't write {target}: {error.strerror}", path=target) from error
    return file_digest(target)


def decompress_file(source: Path, target: Path, *, maximum: int) -> None:
    """Decompress `source` into `target`, and stop if that gets more than `maximum` bytes.

    Raises LayoutError if `source` is not compressed, TooLargeError if its content is larger,
    StorageError if the disk fails.
    """
    temporary = target.with_name(target.name + ".new")
    written = 0
    try:
        with source.open("rb") as packed, temporary.open("wb") as plain:
            reader = zstandard.ZstdDecompressor().stream_reader(packed, read_size=_PIECE_BYTES)
            while piece := reader.read(_PIECE_BYTES):
                written += len(piece)
                if written > maximum:
                    raise TooLargeError(
                        f"a compressed file contains more than {maximum} bytes", maximum=maximum
                    )
                plain.write(piece)
        temporary.replace(target)
    except zstandard.ZstdError as error:
        raise LayoutError(
            f"a file was announced as compressed with Zstandard, but is not: {error}"
        ) from None
    except OSError as error:
        raise StorageError(f"can't write {target}: {error.strerror}", path=target) from error
    finally:
        temporary.unlink(missing_ok=True)
