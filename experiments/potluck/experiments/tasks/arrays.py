"""Data sets in a data directory: files NAME.npz with x_train, y_train, x_test and y_test.

Arrays are memory-mapped: several processes share the pages, and only used pages are in memory.
Mapping needs arrays stored without compression, as `numpy.savez` and `potluck data prepare` write
them. Each process holds its own copy of compressed arrays. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Used fields of the header of a zip archive's member: signature, length of the name, length of the
extra field."""

REQUIRED = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True, kw_only=True)
class DataFormat:
    """Required content of a data set's file.

    shape: shape of one sample; None if any shape is valid (the size of images is chosen in
    preparation). dtype: type of the samples. classes: labels are in [0, classes). attributes: True
    if the file also has `a_train` and `a_test` with a binary attribute of each sample. source: the
    origin of the data, in a sentence for a person who does not have them. natural: True if the file
    also has `c_train` and `c_test`, the number of the client that each sample belongs to, and
    `names`, the clients' names.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any]
    classes: int
    source: str
    attributes: bool = False
    natural: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the arrays in the file."""
        attributes = ("a_train", "a_test") if self.attributes else ()
        return (*REQUIRED, *attributes, *(("c_train", "c_test", "names") if self.natural else ()))

    @property
    def file_name(self) -> str:
        """Name of the file in the data directory."""
        return f"{self.name}.npz"


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrays:
    """A data set. x: n × …, as stored; y: n, int64; a: n, int64 in {0, 1}, or None.

    c: n, int64, number of each sample's client, or None. names: names of these clients.
    """

    x_train: NDArray[Any]
    y_train: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    a_train: NDArray[np.int64] | None = None
    a_test: NDArray[np.int64] | None = None
    c_train: NDArray[np.int64] | None = None
    c_test: NDArray[np.int64] | None = None
    names: tuple[str, ...] = ()


def open_arrays(form: DataFormat, data: Path | None) -> Arrays:
    """Return the arrays of a data set, checked against its format; samples are memory-mapped.

    The mapping is copy-on-write. Raises ConfigurationError, with the needed file and its place, if
    it is missing or invalid.
    """
    if data is None:
        raise ConfigurationError(
            f"task {form.name} reads {form.file_name} from a data directory, but no data "
            "directory is set; set data_directory in the configuration file (or --data), and put "
            f"the file into this directory. {_recipe(form)}",
            task=form.name,
        )
    path = data / form.file_name
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigurationError(
            f"task {form.name} needs {path}: {error.strerror}. {_recipe(form)}",
            task=form.name,
            path=path,
        ) from None
    return _open(form, path.resolve(), status.st_size, status.st_mtime_ns)


def _recipe(form: DataFormat) -> str:
    return (
        f"The file has the arrays {', '.join(form.required)}; create the file with `potluck data "
        f"prepare {form.name} --from FOLDER`, where FOLDER contains {form.source}"
    )


@lru_cache(maxsize=8)
def _open(form: DataFormat, path: Path, _size: int, _modified: int) -> Arrays:
    """Open a file, cached by size and modification time: a host's clients share the mapping."""
    arrays = mapped_arrays(path)
    return checked(form, arrays, source=str(path))


def checked(form: DataFormat, arrays: Mapping[str, NDArray[Any]], *, source: str) -> Arrays:
    """Return arrays that fit a format. Raises ConfigurationError with the mismatch."""
    names = form.required
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ConfigurationError(
            f"{source} lacks the arrays {', '.join(missing)}, and has "
            f"{', '.join(arrays) or 'no arrays'}. {_recipe(form)}",
            path=source,
        )
    clients = _client_names(arrays["names"], source) if form.natural else ()
    labels: dict[str, NDArray[np.int64]] = {}
    for split in ("train", "test"):
        samples = arrays[f"x_{split}"]
        _expect(form, samples, f"{source}: x_{split}")
        for kind, limit in (("y", form.classes), ("a", 2), ("c", len(clients))):
            name = f"{kind}_{split}"
            if name in names:
                labels[name] = _labels(arrays[name], len(samples), limit, f"{source}: {name}")
    samples_of = np.bincount(labels["c_train"], minlength=len(clients)) if clients else np.ones(1)
    if not samples_of.all():
        raise ConfigurationError(
            f"{source}: client '{clients[int(np.argmin(samples_of))]}' has no training sample; "
            f"{_recipe(form)}"
        )
    return Arrays(x_train=arrays["x_train"], x_test=arrays["x_test"], names=clients, **labels)


def _client_names(values: NDArray[Any], source: str) -> tuple[str, ...]:
    if values.ndim != 1 or values.dtype.kind != "U" or len(values) == 0:
        raise ConfigurationError(
            f"{source}: the array names is {values.dtype} {values.shape}, but one text per client "
            "is expected"
        )
    return tuple(values.tolist())


def _expect(form: DataFormat, samples: NDArray[Any], what: str) -> None:
    shape = samples.shape[1:]
    fits = shape == form.shape if form.shape is not None else _is_image(shape)
    if samples.ndim == 0 or len(samples) == 0 or not fits or samples.dtype != form.dtype:
        expected = "n × " + (
            " × ".join(map(str, form.shape)) if form.shape is not None else "height × width × 3"
        )
        raise ConfigurationError(
            f"{what} is {samples.dtype} {samples.shape}, but {form.dtype} {expected} is expected; "
            f"{_recipe(form)}"
        )


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[2] == 3 and min(shape) > 0


def _labels(values: NDArray[Any], samples: int, limit: int, what: str) -> NDArray[np.int64]:
    if values.shape != (samples,) or values.dtype.kind not in "ui":
        raise ConfigurationError(
            f"{what} is {values.dtype} {values.shape}, but whole numbers ({samples},) are expected"
        )
    if not 0 <= int(values.min()) <= int(values.max()) < limit:
        raise ConfigurationError(
            f"{what} is in [{values.min()}, {values.max()}], but must be in [0, {limit - 1}]"
        )
    return values.astype(np.int64)


def mapped_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return all arrays of an .npz file by name; uncompressed ones are mapped copy-on-write.

    Raises ConfigurationError if it is not an .npz file, or holds objects.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return {
                member.filename.removesuffix(".npy"): _array(path, file, archive, member)
                for member in archive.infolist()
            }
    except OSError as error:
        raise ConfigurationError(f"can't read {path}: {error.strerror}", path=path) from None
    except (zipfile.BadZipFile, struct.error, ValueError, EOFError) as error:
        raise ConfigurationError(
            f"{path} is not an .npz file of plain arrays: {error}", path=path
        ) from None


def _array(
    path: Path, file: BinaryIO, archive: zipfile.ZipFile, member: zipfile.ZipInfo
) -> NDArray[Any]:
    if member.compress_type != zipfile.ZIP_STORED:
        with archive.open(member) as packed:
            unpacked: NDArray[Any] = npy.read_array(packed, allow_pickle=False)
            return unpacked
    file.seek(member.header_offset)
    signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise ValueError(f"{member.filename} has an invalid zip header")
    file.seek(name + extra, 1)
    end = file.tell() + member.file_size
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{member.filename} has version {version}, expected 1.0 or 2.0")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{member.filename} contains Python objects")
    if file.tell() + dtype.itemsize * math.prod(shape) != end:
        raise ValueError(f"{member.filename} has more or fewer bytes than {shape} of {dtype} needs")
    mapped: NDArray[Any] = np.memmap(
        path, dtype, mode="c", offset=file.tell(), shape=shape, order="F" if fortran else "C"
    )
    return mapped


def array_sha256(array: NDArray[Any]) -> str:
    """Return the SHA-256 of an array's bytes in C order, in hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
