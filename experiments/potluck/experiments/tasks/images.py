"""Images, split over clients by label: MNIST, EMNIST, CIFAR-10, CIFAR-100, CINIC-10."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from pydantic import PositiveInt

from potluck.common.models.lenet import lenet5
from potluck.common.models.mnist_cnn import mnist_cnn
from potluck.common.models.perceptron import perceptron
from potluck.common.settings.old_spelling import warn_of_old_spelling
from potluck.common.task import Recommended
from potluck.common.tasks.stored import Prepare
from potluck.experiments.tasks.arrays import Arrays, DataFormat
from potluck.experiments.tasks.label_skew import LabelSkewTask
from potluck.experiments.tasks.networks import Networks, dropout_cnn, small_cnn
from potluck.experiments.tasks.preparing import Images

_BYTES = np.dtype(np.uint8)


class _ImageTask(LabelSkewTask):
    images: ClassVar[Images]

    def _prepare(self, arrays: Arrays) -> Prepare:  # noqa: ARG002  for subclasses
        return self.images


@dataclass(frozen=True, kw_only=True)
class Mnist(_ImageTask):
    """Ten handwritten digits, 60,000 training and 10,000 test images of 28 × 28 pixels.

    network: cnn (two 5 × 5 convolutions of 6 and 16 channels), cnn-wide (of 32 and 64), cnn-dropout
    (of 10 and 20, with dropout between two linear layers) or perceptron (one hidden layer of 200).
    For the other options, see `Splitting`.
    """

    network: Literal["cnn", "cnn-wide", "cnn-dropout", "perceptron"] = "cnn"

    name = "mnist"
    form = DataFormat(
        name="mnist",
        shape=(28, 28),
        dtype=_BYTES,
        classes=10,
        source="MNIST's four files such as train-images-idx3-ubyte.gz",
    )
    networks: ClassVar[Networks] = {
        "cnn": small_cnn,
        "cnn-wide": mnist_cnn,
        "cnn-dropout": dropout_cnn,
        "perceptron": partial(perceptron, 784, (200,), 10, 0.0),
    }
    images = Images(means=(0.1307,), deviations=(0.3081,))
    training: ClassVar[Recommended] = {"learning_rate": 0.01, "batch_size": 64, "epochs": 3}


@dataclass(frozen=True, kw_only=True)
class Emnist(_ImageTask):
    """62 handwritten digits and letters, EMNIST's split "byclass", images of 28 × 28.

    The task `femnist` has the same characters by writer; here the clients are made by label.
    network: cnn, cnn-wide or perceptron, as in `mnist`.
    """

    network: Literal["cnn", "cnn-wide", "perceptron"] = "cnn"

    name = "emnist-by-label"
    form = DataFormat(
        name="emnist",
        shape=(28, 28),
        dtype=_BYTES,
        classes=62,
        source="EMNIST's files such as emnist-byclass-train-images-idx3-ubyte.gz",
    )
    networks: ClassVar[Networks] = {
        "cnn": partial(small_cnn, 1, 62),
        "cnn-wide": partial(mnist_cnn, 1, 62),
        "perceptron": partial(perceptron, 784, (200,), 62, 0.0),
    }
    images = Images(means=(0.1736,), deviations=(0.3317,))
    training: ClassVar[Recommended] = {"learning_rate": 0.01, "batch_size": 64, "epochs": 3}


@dataclass(frozen=True, kw_only=True)
class EmnistOldName(Emnist):
    """The task `emnist-by-label` under its old name `emnist`."""

    def __post_init__(self) -> None:
        """Warn that the task has a new name."""
        warn_of_old_spelling("task 'emnist'", "'emnist-by-label'", what="name")


_SMALL: Recommended = {
    "learning_rate": 0.01,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "batch_size": 64,
    "epochs": 5,
    "learning_rate_decay": 0.98,
}


@dataclass(frozen=True, kw_only=True)
class Cifar10(_ImageTask):
    """Ten kinds of objects, 50,000 training and 10,000 test images of 32 × 32 pixels, in colour.

    network: lenet5.
    """

    network: Literal["lenet5"] = "lenet5"

    name = "cifar10"
    form = DataFormat(
        name="cifar10",
        shape=(32, 32, 3),
        dtype=_BYTES,
        classes=10,
        source="CIFAR-10's binary version, cifar-10-binary.tar.gz, or its data_batch_1.bin …",
    )
    networks: ClassVar[Networks] = {"lenet5": lenet5}
    images = Images(means=(0.4914, 0.4822, 0.4465), deviations=(0.2470, 0.2435, 0.2616))
    training: ClassVar[Recommended] = _SMALL


@dataclass(frozen=True, kw_only=True)
class Cifar100(_ImageTask):
    """CIFAR-100's twenty superclasses, 50,000 training and 10,000 test images of 32 × 32 pixels.

    network: lenet5.
    """

    network: Literal["lenet5"] = "lenet5"

    name = "cifar100"
    form = DataFormat(
        name="cifar100",
        shape=(32, 32, 3),
        dtype=_BYTES,
        classes=20,
        source="CIFAR-100's binary version, cifar-100-binary.tar.gz, or its train.bin and test.bin",
    )
    networks: ClassVar[Networks] = {"lenet5": partial(lenet5, 3, 20)}
    images = Images(means=(0.5071, 0.4865, 0.4409), deviations=(0.2673, 0.2564, 0.2762))
    training: ClassVar[Recommended] = _SMALL


@dataclass(frozen=True, kw_only=True)
class Cinic10(_ImageTask):
    """CIFAR-10's classes: 90,000 training and 90,000 test images of 32 × 32, partly from ImageNet.

    network: lenet5.
    """

    clients: PositiveInt = 200
    network: Literal["lenet5"] = "lenet5"

    name = "cinic10"
    form = DataFormat(
        name="cinic10",
        shape=(32, 32, 3),
        dtype=_BYTES,
        classes=10,
        source="CINIC-10's folders train and test, each with one folder of .png files per class",
    )
    networks: ClassVar[Networks] = {"lenet5": lenet5}
    images = Images(means=(0.4789, 0.4723, 0.4305), deviations=(0.2421, 0.2383, 0.2587))
    training: ClassVar[Recommended] = _SMALL
