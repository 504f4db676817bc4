"""Covertype: the kind of forest on a patch of land, from 54 numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from torch import nn

from potluck.common.models.perceptron import perceptron
from potluck.common.task import Recommended
from potluck.common.tasks.stored import Prepare
from potluck.experiments.tasks.arrays import Arrays, DataFormat
from potluck.experiments.tasks.label_skew import LabelSkewTask
from potluck.experiments.tasks.preparing import Columns

SEVEN = DataFormat(
    name="covtype",
    shape=(54,),
    dtype=np.dtype(np.int16),
    classes=7,
    source="Covertype's covtype.data.gz",
)
BINARY = DataFormat(
    name="covtype-binary",
    shape=(54,),
    dtype=np.dtype(np.float32),
    classes=2,
    source="the LIBSVM page's covtype.libsvm.binary (or .scale), plain or as .bz2",
)


@dataclass(frozen=True, kw_only=True)
class Covertype(LabelSkewTask):
    """Seven kinds of forest, or two, from a published balanced subset of 15,120 rows.

    binary: the two-class task, lodgepole pine against the rest, from its own file of all 581,012
    rows. network: perceptron (layers of 45, 30 and 15, dropout 0.2). Columns are standardised by
    the training samples.
    """

    binary: bool = False
    network: Literal["perceptron"] = "perceptron"

    name = "covtype"
    form = SEVEN
    training: ClassVar[Recommended] = {"learning_rate": 0.01, "batch_size": 64, "epochs": 3}

    def model(self) -> nn.Module:
        """Return the network; its last layer depends on the number of classes."""
        return perceptron(54, (45, 30, 15), self.classes, 0.2)

    def _form(self) -> DataFormat:
        return BINARY if self.binary else SEVEN

    def _prepare(self, arrays: Arrays) -> Prepare:
        return _standardised(arrays)


@lru_cache(maxsize=2)
def _standardised(arrays: Arrays) -> Columns:
    samples = arrays.x_train
    deviations = samples.std(axis=0, dtype=np.float64)
    deviations[deviations == 0] = 1.0  # a constant column becomes 0
    means = samples.mean(axis=0, dtype=np.float64)
    return Columns(means=tuple(means.tolist()), deviations=tuple(deviations.tolist()))
