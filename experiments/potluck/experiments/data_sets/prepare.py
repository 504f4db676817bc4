"""Converts a download into a file of the data directory; checks arrays with known digests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.task import Task
from potluck.experiments.data_sets import cifar, flamby_files, idx, leaf, photographs, plays
from potluck.experiments.data_sets import covertype_download as covertype
from potluck.experiments.data_sets.search import Found
from potluck.experiments.tasks.arrays import (
    DataFormat,
    array_sha256,
    checked,
    mapped_arrays,
    open_arrays,
)
from potluck.experiments.tasks.covertype import BINARY, SEVEN
from potluck.experiments.tasks.femnist import Femnist
from potluck.experiments.tasks.flamby import Isic2019, TcgaBrca
from potluck.experiments.tasks.images import Cifar10, Cifar100, Cinic10, Emnist, Mnist
from potluck.experiments.tasks.shakespeare import Shakespeare
from potluck.experiments.tasks.spurious import Spawrious, Waterbirds


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set that can be prepared.

    read: function that returns the arrays in a download's folder. read_sized: such a function that
    also takes the side of images, in pixels. sums: known SHA-256 digests of the arrays' bytes in C
    order.
    """

    form: DataFormat
    read: Callable[[Path], Found] | None = None
    read_sized: Callable[[Path, int], Found] | None = None
    sums: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A written file. sums: SHA-256 by array. known: True if they equal known digests."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    sums: Mapping[str, str]
    known: bool


def prepare(name: str, source: Path, target: Path, side: int) -> Prepared:
    """Convert the download in `source` to a file in `target`. side: of photographs, in pixels.

    Raises ConfigurationError if the download is incomplete or is another one, StorageError if the
    file can't be written.
    """
    data_set = DATA_SETS.get(name)
    if data_set is None:
        raise ConfigurationError(
            f"unknown data set '{name}'; known data sets: {', '.join(DATA_SETS)}", name=name
        )
    if not source.is_dir():
        raise ConfigurationError(
            f"{source} is not a folder; give a folder with {data_set.form.source}", path=source
        )
    read = data_set.read
    if data_set.read_sized is not None:
        read = partial(_sized, data_set.read_sized, side)
    if read is None:
        raise ConfigurationError(f"can't read data set '{name}'", name=name)
    try:
        found = {key: np.ascontiguousarray(value) for key, value in read(source).items()}
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error.message}; `potluck data prepare {name}` needs {data_set.form.source}",
            **error.metadata,
        ) from None
    checked(data_set.form, found, source=str(source))
    sums = {key: array_sha256(value) for key, value in found.items()}
    wrong = [key for key, expected in data_set.sums.items() if sums[key] != expected]
    if wrong:
        raise ConfigurationError(
            f"{', '.join(wrong)} from {source} does not have the known SHA-256 of {name}; "
            "download the data set again"
        )
    return Prepared(
        path=_write(target / data_set.form.file_name, found),
        shapes={key: value.shape for key, value in found.items()},
        sums=sums,
        known=bool(data_set.sums),
    )


def data_sets_of(task: Task) -> tuple[str, ...]:
    """Return the names of the data sets whose files a task reads."""
    read = task.data_files() or ()
    return tuple(name for name, each in DATA_SETS.items() if each.form.file_name in read)


def stored_sha256(name: str, folder: Path | None) -> str:
    """Return the SHA-256 of a prepared data set: of the names and digests of its arrays.

    folder: data directory. Raises ConfigurationError if the file is missing or invalid.
    """
    form = DATA_SETS[name].form
    open_arrays(form, folder)  # checks the file
    arrays = mapped_arrays((folder or Path()) / form.file_name)
    return _whole_sha256({key: array_sha256(arrays[key]) for key in form.required})


def known_sha256(name: str) -> str | None:
    """Return what `stored_sha256` returns for the known arrays of a data set; None if unknown."""
    data_set = DATA_SETS[name]
    complete = set(data_set.sums) == set(data_set.form.required)
    return _whole_sha256(data_set.sums) if complete else None


def _whole_sha256(sums: Mapping[str, str]) -> str:
    text = "".join(f"{key} {sums[key]}\n" for key in sorted(sums))
    return hashlib.sha256(text.encode()).hexdigest()


def _sized(read: Callable[[Path, int], Found], side: int, folder: Path) -> Found:
    return read(folder, side)


def _write(path: Path, found: Found) -> Path:
    """Write a complete file or none, without compression, so that tasks can map it."""
    partial_path = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_path.open("wb") as file:
            np.savez(file, allow_pickle=False, **found)
            file.flush()
            os.fsync(file.fileno())
        partial_path.replace(path)
    except OSError as error:
        raise StorageError(f"can't write {path}: {error.strerror}", path=path) from None
    return path


DATA_SETS: Final[Mapping[str, DataSet]] = {
    "cifar10": DataSet(
        form=Cifar10.form,
        read=cifar.cifar10,
        sums={
            "x_train": "32b25bb65187cdb40e66b2bd4dbb2de04f62e2d521f74c46a56f39f2afb56e96",
            "y_train": "f5f0254261d4b815631fb00355e0b4b53f8ee0ec2cdfdef4b12290a12aa2ddf8",
            "x_test": "27f7d008727f5b9a8f5b01f61503d2f52d3ba7f5ffb2c331b5b82775de2e2d72",
            "y_test": "24020a57eb5141b27aa0417447162290a6f6c5c1549a112edbed2c09fdbbf307",
        },
    ),
    "cifar100": DataSet(form=Cifar100.form, read=cifar.cifar100),
    "cinic10": DataSet(form=Cinic10.form, read=photographs.cinic10),
    "covtype": DataSet(
        form=SEVEN,
        read=covertype.covertype,
        sums={
            "x_train": "96c43907d587ffa32587a7eecaedbd39b41dade071d0d834755fd284f0a3dfbc",
            "y_train": "7ddcaedfa6d2ab412f3c90bf869f69a320c3cea939638f6272b8518832ef7f7e",
            "x_test": "e74d8a83cc86722b6680e28ea4a58ff0567b4341bd8123756cea9a034b1c71d0",
            "y_test": "602ec737cd67a9a85155e1720fc52deffe5994ae4ebcfe85627833f0b5042c61",
        },
    ),
    "covtype-binary": DataSet(form=BINARY, read=covertype.covertype_binary),
    "emnist": DataSet(form=Emnist.form, read=idx.emnist),
    "femnist": DataSet(form=Femnist.form, read=leaf.femnist),
    "isic2019": DataSet(form=Isic2019.form, read_sized=flamby_files.isic2019),
    "mnist": DataSet(
        form=Mnist.form,
        read=idx.mnist,
        sums={
            "x_train": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
            "y_train": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
            "x_test": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
            "y_test": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
        },
    ),
    "shakespeare": DataSet(
        form=Shakespeare.form,
        read=plays.shakespeare,
        sums={
            "x_train": "693b766d5eaf0f9ab1cabec007435c64fe75c78e574db51c273713052b30a325",
            "y_train": "fd7b8898a0718e5400fa856a17fa1a105832e88817c89ae91e9fa70077dae6c9",
            "c_train": "70c6485d653b699224a0544701af4b2c8739a8735ef56d44dbf8ca50ac91e3c4",
            "x_test": "0af581f5b1a3ec49b0795508e9b703f525907f1b3d673ad96a4092118f544207",
            "y_test": "dc9748e9e577635afcb4a8fdf101b8c98b3b265f9fd5bebaedf256123da72002",
            "c_test": "315abd7517ddb5b4687a5865fbf3101c0d61427f74d4737c4a740d0acedf9889",
            "names": "c582861d5aa94f0cede52a3c67daf88f27e6a9fc6359aff5fc609a12676f9212",
        },
    ),
    "spawrious": DataSet(form=Spawrious.form, read_sized=photographs.spawrious),
    "tcga-brca": DataSet(
        form=TcgaBrca.form,
        read=flamby_files.tcga_brca,
        sums={
            "x_train": "335ba391f9282bf8b5b276280174d683c9812e33cf4cc81773325d6705399cb0",
            "y_train": "3ae0485fd41df863e85efc62c5830b6839db64175bad1deb77a42fc11314ad89",
            "c_train": "a3aa040729da647a884d94d72ea567140487e8ed092b6a25b5e77ea30caf8250",
            "x_test": "5d9989f50a96d51cd9da7b65ffbdc1a1464ac57bd914a890537ef6539042f4fa",
            "y_test": "c4ca1443d21759306e6c3148e711b425967d456002a01226780fa123bf9d9c10",
            "c_test": "535792263e2715c77082c60a2846541f8c08aaebc46391514cff4c9ac3fcccd4",
        },
    ),
    "waterbirds": DataSet(form=Waterbirds.form, read_sized=photographs.waterbirds),
}
