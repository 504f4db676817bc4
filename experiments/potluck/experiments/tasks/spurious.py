"""FedDiverse's tasks: images with an attribute that correlates with the class at most clients.

Clients are split by Table 6 of the FedDiverse paper, each by its interaction matrix of class and
attribute. Groups are class × 2 + attribute.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt
from torch import nn

from potluck.common.models.mnist_cnn import mnist_cnn
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples, Recommended, Task
from potluck.common.tasks.partition import (
    HeldOut,
    Indices,
    by_counts,
    held_out_split,
    part_number,
    scaled,
)
from potluck.common.tasks.table6 import interaction_matrices
from potluck.experiments.tasks.arrays import Arrays, DataFormat, open_arrays
from potluck.experiments.tasks.images import Mnist
from potluck.experiments.tasks.label_skew import stored_examples
from potluck.experiments.tasks.networks import Networks, photograph_cnn, small_cnn
from potluck.experiments.tasks.preparing import Colored, Images

_BYTES = np.dtype(np.uint8)
_IMAGENET = Images(means=(0.485, 0.456, 0.406), deviations=(0.229, 0.224, 0.225))


@dataclass(frozen=True, kw_only=True)
class SpuriousTask(Task):
    """Base class of the tasks whose data are split by Table 6.

    distribution: the name of the partition. seed: seed of the choice of samples. share: fraction of
    each client's samples that is used, in (0, 1]. held_out: fraction of its samples that each
    client evaluates on. network: the model's name.
    """

    distribution: str = ""
    seed: NonNegativeInt = 0
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    held_out: HeldOut = 0.0
    network: str = ""

    name: ClassVar[str]

    @property
    def clients(self) -> int:  # type: ignore[override]  # follows from the options
        """Number of clients in the partition."""
        return len(self.matrices())

    @property
    def classes(self) -> int:  # type: ignore[override]  # follows from the options
        """Number of classes in the partition."""
        return int(self.matrices().shape[1])

    @property
    def groups(self) -> int:  # type: ignore[override]  # follows from the options
        """Number of groups: one per class and attribute."""
        return 2 * self.classes

    def matrices(self) -> NDArray[np.int64]:
        """Number of samples by client, class and attribute: clients × classes × 2."""
        return _matrices(self.distribution, self.share)


@lru_cache(maxsize=8)
def _matrices(distribution: str, share: float) -> NDArray[np.int64]:
    table = interaction_matrices(distribution)
    if share == 1.0:
        return table
    return np.stack([scaled(matrix, max(1, int(share * matrix.sum() + 0.5))) for matrix in table])


def _train_and_held_out(
    task: SpuriousTask, client: ClientId, parts: list[Indices]
) -> tuple[Indices, Indices]:
    part = part_number(client, len(parts), task=task.name)
    return held_out_split(parts[part], task.held_out, np.random.default_rng((task.seed, part)))


@dataclass(frozen=True, kw_only=True)
class ColoredMnist(SpuriousTask):
    """MNIST's digits, 0–4 or 5–9 as classes, in red or green: CMNIST_GSC of FedDiverse's Table 6.

    There are 24 clients with 200 images each; the seed decides which image has which colour. Of the
    coordinator's 10,000 test images of digits, half of each digit are red, half green. network: cnn
    or cnn-wide, as in `mnist`.
    """

    distribution: Literal["cmnist-gsc"] = "cmnist-gsc"
    network: Literal["cnn", "cnn-wide"] = "cnn"

    name = "cmnist"
    networks: ClassVar[Networks] = {
        "cnn": partial(small_cnn, 3, 2),
        "cnn-wide": partial(mnist_cnn, 3, 2),
    }
    training: ClassVar[Recommended] = {"learning_rate": 0.01, "batch_size": 28, "epochs": 1}
    triplet: ClassVar[Recommended] = {
        "pretraining_rounds": 70,
        "attribute_learning_rate": 1.0,
        "attribute_steps": 500,
    }
    """Many rounds and steps, since a network without pre-training first learns nothing, then
    colours, and only later shapes."""

    def model(self) -> nn.Module:
        """Return the network."""
        return self.networks[self.network]()

    def data_files(self) -> tuple[str, ...]:
        """Return the name of the data set's file."""
        return (Mnist.form.file_name,)

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Return the part whose index is the number at the end of the client's id."""
        arrays = open_arrays(Mnist.form, data)
        parts, colors = _colored_parts(arrays, self.seed, self.share)
        train, rest = _train_and_held_out(self, client, parts)
        return ClientData(
            train=_colored(arrays.x_train, arrays.y_train, train, colors),
            held_out=_colored(arrays.x_train, arrays.y_train, rest, colors) if len(rest) else None,
        )

    def evaluation_data(self, data: Path | None) -> Examples | None:
        """Return all test images; those of each digit are alternately red and green."""
        arrays = open_arrays(Mnist.form, data)
        colors = np.zeros(len(arrays.y_test), dtype=np.int64)
        for digit in range(10):
            members = np.flatnonzero(arrays.y_test == digit)
            colors[members] = np.arange(len(members)) % 2
        return _colored(arrays.x_test, arrays.y_test, np.arange(len(colors)), colors)


def _colored(
    images: NDArray[np.uint8],
    digits: NDArray[np.int64],
    rows: Indices,
    colors: NDArray[np.int64],
) -> Examples:
    large = (digits >= 5).astype(np.int64)
    groups = large[rows] * 2 + colors[rows]
    return stored_examples(images, large, rows, Colored(), groups)


@lru_cache(maxsize=4)
def _colored_parts(
    arrays: Arrays, seed: int, share: float
) -> tuple[list[Indices], NDArray[np.int64]]:
    """Return (indices of each client's images, the colour of every image)."""
    matrices = _matrices("cmnist-gsc", share)
    large = (arrays.y_train >= 5).astype(np.int64)
    parts = by_counts(large, matrices.sum(axis=2), np.random.default_rng(seed))
    colors = np.zeros(len(large), dtype=np.int64)
    for part, matrix in zip(parts, matrices, strict=True):
        colors[part] = np.repeat([0, 1, 0, 1], matrix.ravel())  # `part` lists digits 0–4 first
    return parts, colors


@dataclass(frozen=True, kw_only=True)
class _PhotographTask(SpuriousTask):
    """Base class of tasks of photographs with an attribute; their size is chosen in preparation."""

    form: ClassVar[DataFormat]

    def model(self) -> nn.Module:
        """Return the network."""
        return photograph_cnn(self.classes)

    def data_files(self) -> tuple[str, ...]:
        """Return the name of the data set's file."""
        return (self.form.file_name,)

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Return the part whose index is the number at the end of the client's id."""
        arrays = open_arrays(self.form, data)
        train, rest = _train_and_held_out(
            self, client, _parts(arrays, self.distribution, self.seed, self.share)
        )
        return ClientData(
            train=_photographs(arrays.x_train, arrays.y_train, arrays.a_train, train),
            held_out=_photographs(arrays.x_train, arrays.y_train, arrays.a_train, rest)
            if len(rest)
            else None,
        )

    def evaluation_data(self, data: Path | None) -> Examples | None:
        """Return the test images of the partition's classes."""
        arrays = open_arrays(self.form, data)
        rows = np.flatnonzero(arrays.y_test < self.classes).astype(np.int64)
        return _photographs(arrays.x_test, arrays.y_test, arrays.a_test, rows)


def _photographs(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    attributes: NDArray[np.int64] | None,
    rows: Indices,
) -> Examples:
    known = np.zeros(len(labels), dtype=np.int64) if attributes is None else attributes
    return stored_examples(images, labels, rows, _IMAGENET, labels[rows] * 2 + known[rows])


@lru_cache(maxsize=4)
def _parts(arrays: Arrays, distribution: str, seed: int, share: float) -> list[Indices]:
    matrices = _matrices(distribution, share)
    attributes = arrays.a_train if arrays.a_train is not None else np.zeros_like(arrays.y_train)
    cells = arrays.y_train * 2 + attributes
    return by_counts(cells, matrices.reshape(len(matrices), -1), np.random.default_rng(seed))


@dataclass(frozen=True, kw_only=True)
class Waterbirds(_PhotographTask):
    """Land or water birds in photographs of land or water: WaterBirds_dist of Table 6, 30
    clients."""

    distribution: Literal["waterbirds-dist"] = "waterbirds-dist"
    network: Literal["cnn"] = "cnn"

    name = "waterbirds"
    form = DataFormat(
        name="waterbirds",
        shape=None,
        dtype=_BYTES,
        classes=2,
        source="WaterBirds' metadata.csv and its folders of images",
        attributes=True,
    )
    training: ClassVar[Recommended] = {"learning_rate": 0.001, "batch_size": 28, "epochs": 1}


@dataclass(frozen=True, kw_only=True)
class Spawrious(_PhotographTask):
    """Breeds of dogs, on a beach or in snow: the Spawrious splits of FedDiverse's Table 6.

    Classes 0 and 1 are labrador and dachshund; spawrious-4 adds bulldog and corgi.
    """

    distribution: Literal[
        "spawrious-gsc", "spawrious-gci", "spawrious-gai", "spawrious-4", "spawrious-gci-100"
    ] = "spawrious-gsc"
    network: Literal["cnn"] = "cnn"

    name = "spawrious"
    form = DataFormat(
        name="spawrious",
        shape=None,
        dtype=_BYTES,
        classes=4,
        source="Spawrious's images, as 0/beach/labrador/….png; beach and snow are used",
        attributes=True,
    )
    training: ClassVar[Recommended] = {"learning_rate": 0.001, "batch_size": 28, "epochs": 1}
