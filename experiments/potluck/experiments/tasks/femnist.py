"""FEMNIST: 62 handwritten characters; each writer is a client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from pydantic import PositiveInt

from potluck.common.models.mnist_cnn import mnist_cnn
from potluck.common.models.perceptron import perceptron
from potluck.common.task import Recommended
from potluck.common.tasks.stored import Prepare
from potluck.experiments.tasks.arrays import Arrays, DataFormat
from potluck.experiments.tasks.natural import NaturalTask
from potluck.experiments.tasks.networks import Networks, small_cnn
from potluck.experiments.tasks.preparing import Images


@dataclass(frozen=True, kw_only=True)
class Femnist(NaturalTask):
    """62 digits and letters by writer, images of 28 × 28, as LEAF's preprocessing splits them.

    clients: number of writers, the first ones by id. network: cnn, cnn-wide or perceptron, as in
    `mnist`.
    """

    clients: PositiveInt = 100
    network: Literal["cnn", "cnn-wide", "perceptron"] = "cnn"

    name = "femnist"
    form = DataFormat(
        name="femnist",
        shape=(28, 28),
        dtype=np.dtype(np.uint8),
        classes=62,
        source="LEAF's data/femnist/data after preprocess.sh -t sample, with train/*.json and "
        "test/*.json",
        natural=True,
    )
    networks: ClassVar[Networks] = {
        "cnn": partial(small_cnn, 1, 62),
        "cnn-wide": partial(mnist_cnn, 1, 62),
        "perceptron": partial(perceptron, 784, (200,), 62, 0.0),
    }
    training: ClassVar[Recommended] = {"learning_rate": 0.05, "batch_size": 20, "epochs": 1}

    def _prepare(self, arrays: Arrays) -> Prepare:  # noqa: ARG002  for subclasses
        return Images(means=(0.0,), deviations=(1.0,))
