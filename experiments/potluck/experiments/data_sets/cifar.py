"""Reads CIFAR-10 and CIFAR-100 in their binary version; the Python version is a pickle."""

from __future__ import annotations

import tarfile
import zlib
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError
from potluck.experiments.data_sets.search import LARGEST, Found, missing


def cifar10(folder: Path) -> Found:
    """Return CIFAR-10, sorted by the pixels' SHA-256: the order is the same from any source.

    Raises ConfigurationError.
    """
    found: Found = {}
    names = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
    for split, files in (("train", names), ("test", ("test_batch.bin",))):
        records = _cifar_records(folder, files, 1)
        images = _images(records, 1)
        order = sorted(range(len(images)), key=lambda row: sha256(images[row].data).digest())
        found[f"x_{split}"], found[f"y_{split}"] = images[order], records[order, 0]
    return found


def cifar100(folder: Path) -> Found:
    """Return CIFAR-100 with its twenty superclasses as labels. Raises ConfigurationError."""
    found: Found = {}
    for split in ("train", "test"):
        records = _cifar_records(folder, (f"{split}.bin",), 2)
        found[f"x_{split}"], found[f"y_{split}"] = _images(records, 2), records[:, 0].copy()
    return found


def _cifar_records(folder: Path, names: tuple[str, ...], labels: int) -> NDArray[np.uint8]:
    """Return the records of CIFAR's binary version: each has labels, then 3 × 32 × 32 bytes."""
    size = labels + 3072
    pieces: list[bytes] = []
    archives = sorted(folder.rglob("*binary*.tar.gz"))
    for name in names:
        found = next(iter(sorted(folder.rglob(name))), None)
        if found is not None:
            pieces.append(found.read_bytes())
        elif archives:
            pieces.append(_member(archives[0], name))
        elif list(folder.rglob("*.tar.gz")) or list(folder.rglob("data_batch_1")):
            raise ConfigurationError(
                f"{folder} has CIFAR's Python version, a pickle that could run code; download the "
                "binary version (cifar-10-binary.tar.gz or cifar-100-binary.tar.gz)"
            )
        else:
            raise missing(folder, f"{name} or an archive of CIFAR's binary version")
    data = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    if len(data) == 0 or len(data) % size:
        raise ConfigurationError(
            f"{', '.join(names)}: {len(data)} bytes are not a multiple of the record size {size}; "
            "download the archive again"
        )
    return data.reshape(-1, size)


def _member(archive: Path, name: str) -> bytes:
    try:
        with tarfile.open(archive) as packed:
            for entry in packed:
                if entry.isfile() and Path(entry.name).name == name and entry.size <= LARGEST:
                    file = packed.extractfile(entry)
                    if file is not None:
                        return file.read()
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"can't read {archive}: {error}", path=archive) from None
    raise ConfigurationError(f"{archive} does not contain {name}", path=archive)


def _images(records: NDArray[np.uint8], labels: int) -> NDArray[np.uint8]:
    planes = records[:, labels:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
