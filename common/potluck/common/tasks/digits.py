"""Handwritten digits: 1,797 images of 8 × 8 pixels, which are part of Potluck.

They are the test set of E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI
Machine Learning Repository 1998 (CC BY 4.0), in the same file as in scikit-learn.

`Digits` is plain recognition with label skew. `ColoredDigits` separates small digits (0–4) from
large ones (5–9). In the data of most clients, a digit's colour depends on its size; in the test set
it does not.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from potluck.common.errors import ConfigurationError
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples, Recommended, Task
from potluck.common.tasks.label_noise import LabelNoise, mislabelled
from potluck.common.tasks.partition import (
    HeldOut,
    Indices,
    by_counts,
    dirichlet,
    held_out_split,
    part_number,
    put_aside,
    scaled,
    stratified,
)
from potluck.common.tasks.table6 import interaction_matrices

_TEST_PER_DIGIT = 40
_LEAST_SAMPLES = 10


@lru_cache(maxsize=1)
def images_and_digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return all images (1797 × 8 × 8, float32 in [0, 1]) and their digits (1797, int64)."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return (table[:, :-1] / 16.0).reshape(-1, 8, 8), table[:, -1].astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Digits(LabelNoise, Task):
    """Recognition of ten digits; every client has its own mix of digits.

    clients: number of parts into which the images are split. alpha: parameter of the Dirichlet
    distribution; a smaller alpha skews labels more. seed: seed of the partition. held_out: share of
    its samples on which each client evaluates. central_test: True if the coordinator has 40 test
    images per digit; if False, clients have all images and must hold some out. public: number of
    images that only the coordinator has, without their labels. samples: number of images, drawn at
    random, that are split over the clients; 0 for all remaining ones. ordered: True if clients are
    sorted by their mean digit, so that neighbours have similar digits. digit_groups: True if each
    digit is a group, so that the worst group is the digit with the lowest accuracy. Wrong labels:
    see `LabelNoise`. Raises ConfigurationError.
    """

    clients: PositiveInt = 24
    alpha: PositiveFloat = 0.5
    seed: NonNegativeInt = 0
    held_out: HeldOut = 0.0
    central_test: bool = True
    public: NonNegativeInt = 0
    samples: NonNegativeInt = 0
    ordered: bool = False
    digit_groups: bool = False

    classes = 10
    training: ClassVar[Recommended] = {
        "learning_rate": 0.1,
        "momentum": 0.9,
        "batch_size": 16,
        "epochs": 3,
    }

    @property
    def groups(self) -> int:  # type: ignore[override]  # follows from the options
        """10 if each digit is a group, else 0."""
        return self.classes if self.digit_groups else 0

    def __post_init__(self) -> None:
        if not self.central_test and not self.held_out:
            raise ConfigurationError(
                "task digits: no data to evaluate on; set held_out, or central_test = true"
            )

    def model(self) -> nn.Module:
        """Return a perceptron with one hidden layer of 64 units."""
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:  # noqa: ARG002  the data are in the package
        """Return the data of a client: the part whose number is at the end of the client's id."""
        part = part_number(client, self.clients, task="digits")
        parts, _, _ = _split_digits(self)
        found = _client_data(self._examples, parts[part], self.held_out, (self.seed, part))
        labels = mislabelled(
            found.train.labels,
            self,
            classes=self.classes,
            part=part,
            clients=self.clients,
            seed=self.seed,
        )
        return replace(found, train=replace(found.train, labels=labels))

    def data_files(self) -> tuple[str, ...]:
        """Return an empty tuple: the digits are part of Potluck."""
        return ()

    def evaluation_data(self, data: Path | None) -> Examples | None:  # noqa: ARG002
        """Return forty images of each digit; None if `central_test` is False."""
        return self._examples(_split_digits(self)[1]) if self.central_test else None

    def public_data(self, data: Path | None) -> Tensor | None:  # noqa: ARG002
        """Return the inputs of the public images; None if there are none."""
        return _plain(_split_digits(self)[2]).inputs if self.public else None

    def public_labels(self, data: Path | None) -> Tensor | None:  # noqa: ARG002
        """Return the digits of the public images; None if there are none."""
        return _plain(_split_digits(self)[2]).labels if self.public else None

    def _examples(self, indices: Indices) -> Examples:
        found = _plain(indices)
        return replace(found, groups=found.labels) if self.digit_groups else found


@lru_cache(maxsize=4)
def _split_digits(task: Digits) -> tuple[list[Indices], Indices, Indices]:
    """Return (parts of the clients, test images, public images)."""
    _, digits = images_and_digits()
    generator = np.random.default_rng(task.seed)
    rest, test = stratified(digits, _TEST_PER_DIGIT if task.central_test else 0, generator)
    rest, public = put_aside(rest, task.public, task.seed, clients=task.clients)
    if 0 < task.samples < len(rest):
        rest = np.sort(
            np.random.default_rng((task.seed, task.samples)).permutation(rest)[: task.samples]
        )
    minimum = max(1, min(_LEAST_SAMPLES, len(rest) // (2 * task.clients)))
    parts = dirichlet(digits[rest], task.clients, task.alpha, generator, minimum=minimum)
    if task.ordered:
        parts.sort(key=lambda part: float(digits[rest[part]].mean()))
    return [rest[part] for part in parts], test, public


@dataclass(frozen=True, kw_only=True)
class ColoredDigits(Task):
    """Classification of digits as small or large; red or green colour is a misleading feature.

    The images are split by the row CMNIST_GSC of FedDiverse's Table 6. Each client's matrix (size ×
    colour) is scaled down to the available images; every image is used once. The metrics in that
    row of the table hold only roughly unless the number of clients is a multiple of 24. In the
    coordinator's test set, half of the images of each digit are red and half are green. Groups are
    size × 2 + colour.

    clients: number of parts into which the images are split. seed: seed of the partition. held_out:
    share of its samples on which each client evaluates. public: number of images that only the
    coordinator has, without their labels; half of them red, half green.
    """

    clients: PositiveInt = 24
    seed: NonNegativeInt = 0
    held_out: HeldOut = 0.0
    public: NonNegativeInt = 0

    classes = 2
    groups = 4
    training: ClassVar[Recommended] = {
        "learning_rate": 0.1,
        "momentum": 0.9,
        "batch_size": 16,
        "epochs": 5,
    }
    triplet: ClassVar[Recommended] = {
        "attribute_learning_rate": 0.1,
        "attribute_steps": 100,
    }

    def model(self) -> nn.Module:
        """Return a perceptron with one hidden layer of 128 units."""
        return nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 16 * 16, 128), nn.ReLU(), nn.Linear(128, 2)
        )

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:  # noqa: ARG002  the data are in the package
        """Return the data of a client: the part whose number is at the end of the client's id."""
        part = part_number(client, self.clients, task="colored-digits")
        parts, _, _, colors = _split_colored(self)

        def examples(indices: Indices) -> Examples:
            return _colored(indices, colors)

        return _client_data(examples, parts[part], self.held_out, (self.seed, part))

    def data_files(self) -> tuple[str, ...]:
        """Return an empty tuple: the digits are part of Potluck."""
        return ()

    def evaluation_data(self, data: Path | None) -> Examples:  # noqa: ARG002
        """Return twenty images of each digit in each colour."""
        _, test, _, colors = _split_colored(self)
        return _colored(test, colors)

    def public_data(self, data: Path | None) -> Tensor | None:  # noqa: ARG002
        """Return the inputs of the public images; None if there are none."""
        _, _, public, colors = _split_colored(self)
        return _colored(public, colors).inputs if self.public else None

    def public_labels(self, data: Path | None) -> Tensor | None:  # noqa: ARG002
        """Return the digits of the public images; None if there are none."""
        _, _, public, colors = _split_colored(self)
        return _colored(public, colors).labels if self.public else None


@lru_cache(maxsize=4)
def _split_colored(
    task: ColoredDigits,
) -> tuple[list[Indices], Indices, Indices, NDArray[np.int64]]:
    """Return (parts of the clients, test images, public images, colour of every image: 0 red, 1
    green)."""
    _, digits = images_and_digits()
    generator = np.random.default_rng(task.seed)
    rest, test = stratified(digits, _TEST_PER_DIGIT, generator)
    rest, public = put_aside(rest, task.public, task.seed, clients=task.clients)
    large = (digits[rest] >= 5).astype(np.int64)
    matrices = _fitting(task.clients, np.bincount(large, minlength=2))
    parts = [rest[part] for part in by_counts(large, matrices.sum(axis=2), generator)]
    colors = np.zeros(len(digits), dtype=np.int64)
    for part, matrix in zip(parts, matrices, strict=True):
        colors[part] = np.repeat([0, 1, 0, 1], matrix.ravel())  # digits 0 to 4 come first in `part`
    for digit in range(10):
        colors[test[digits[test] == digit]] = np.arange(_TEST_PER_DIGIT) % 2
    colors[public] = np.arange(len(public)) % 2
    return parts, test, public, colors


def _fitting(clients: int, available: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return Table 6's matrices for `clients` clients, scaled to the available images of each
    class."""
    table = _interleaved(interaction_matrices("cmnist-gsc"))
    chosen = [table[client % len(table)] for client in range(clients)]
    for samples in range(int(table[0].sum()), _LEAST_SAMPLES - 1, -1):
        matrices = np.stack([scaled(matrix, samples) for matrix in chosen])
        if bool((matrices.sum(axis=(0, 2)) <= available).all()):
            return matrices
    raise ConfigurationError(
        f"task colored-digits has {available.sum()} images, too few for {clients} clients with "
        f"at least {_LEAST_SAMPLES} each; use fewer clients",
        clients=clients,
    )


def _interleaved(matrices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Reorder Table 6's four CI, four AI and sixteen SC clients, so that any six neighbours include
    all three types.

    So the first few clients, or the clients of one host, resemble the whole federation.
    """
    mirrored_in_turn = (0, 2, 1, 3)
    order: list[int] = []
    for block, pure in enumerate(mirrored_in_turn):
        order += [pure, 4 + pure, *range(8 + 4 * block, 12 + 4 * block)]
    return matrices[order]


def _client_data(
    examples: Callable[[Indices], Examples], part: Indices, held_out: float, seed: tuple[int, int]
) -> ClientData:
    train, rest = held_out_split(part, held_out, np.random.default_rng(seed))
    return ClientData(train=examples(train), held_out=examples(rest) if len(rest) else None)


def _plain(indices: Indices) -> Examples:
    images, digits = images_and_digits()
    return Examples(
        inputs=torch.from_numpy(images[indices]), labels=torch.from_numpy(digits[indices])
    )


def _colored(indices: Indices, colors: NDArray[np.int64]) -> Examples:
    """Return n × 3 × 16 × 16 images (red, green and an empty blue channel); each pixel is doubled
    in both directions."""
    images, digits = images_and_digits()
    inputs = np.zeros((len(indices), 3, 16, 16), dtype=np.float32)
    enlarged = images[indices].repeat(2, axis=1).repeat(2, axis=2)
    inputs[np.arange(len(indices)), colors[indices]] = enlarged
    labels = (digits[indices] >= 5).astype(np.int64)
    return Examples(
        inputs=torch.from_numpy(inputs),
        labels=torch.from_numpy(labels),
        groups=torch.from_numpy(labels * 2 + colors[indices]),
    )
