"""Two data sets of FLamby with natural clients: breast cancer by region, skin lesions by centre."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Final, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from potluck.common.models.perceptron import perceptron
from potluck.common.task import Recommended
from potluck.common.tasks.stored import Prepare
from potluck.experiments.tasks.arrays import Arrays, DataFormat
from potluck.experiments.tasks.natural import NaturalTask
from potluck.experiments.tasks.networks import Networks, photograph_cnn
from potluck.experiments.tasks.preparing import Images

REGIONS: Final = ("0", "1", "2", "3", "4", "5")
"""The numbers of FLamby's six regions or centres, which are client-0 … client-5."""

PATIENT_COLUMNS: Final = 39
_AGE = 0


@dataclass(frozen=True, kw_only=True)
class TcgaBrca(NaturalTask):
    """Recorded death, or none, of a breast cancer patient; a client is one of six regions.

    FLamby fits a Cox model to the time until death. Here the label is that model's event (0 or 1),
    and the time is not used, so accuracies are not comparable with FLamby's. network: logistic or
    perceptron (one hidden layer of 16). Features are FLamby's 39 columns, the age divided by 100.
    The worst group is the region with the lowest accuracy.
    """

    clients: Annotated[int, Field(ge=1, le=len(REGIONS))] = len(REGIONS)
    network: Literal["logistic", "perceptron"] = "logistic"

    name = "tcga-brca"
    grouped = True
    form = DataFormat(
        name="tcga-brca",
        shape=(PATIENT_COLUMNS,),
        dtype=np.dtype(np.float32),
        classes=2,
        source="FLamby's folder fed_tcga_brca, with brca.csv and train_test_split.csv",
        natural=True,
    )
    networks: ClassVar[Networks] = {
        "logistic": partial(perceptron, PATIENT_COLUMNS, (), 2, 0.0),
        "perceptron": partial(perceptron, PATIENT_COLUMNS, (16,), 2, 0.0),
    }
    training: ClassVar[Recommended] = {"learning_rate": 0.1, "batch_size": 8, "epochs": 1}

    def _prepare(self, arrays: Arrays) -> Prepare:  # noqa: ARG002  for subclasses
        return _with_small_age


def _with_small_age(samples: Tensor, groups: Tensor | None) -> Tensor:  # noqa: ARG001  a `Prepare`
    scale = torch.ones(PATIENT_COLUMNS, device=samples.device)
    scale[_AGE] = 0.01
    return samples * scale


@dataclass(frozen=True, kw_only=True)
class Isic2019(NaturalTask):
    """Eight kinds of skin lesions on photographs; a client is one of six centres.

    FLamby trains a pre-trained EfficientNet on crops with random changes; this network is small and
    sees the prepared images as they are. The worst group is the centre with the lowest accuracy.
    """

    clients: Annotated[int, Field(ge=1, le=len(REGIONS))] = len(REGIONS)
    network: Literal["cnn"] = "cnn"

    name = "isic2019"
    grouped = True
    form = DataFormat(
        name="isic2019",
        shape=None,
        dtype=np.dtype(np.uint8),
        classes=8,
        source="FLamby's file train_test_split of fed_isic2019 and the folder of ISIC_….jpg images",
        natural=True,
    )
    networks: ClassVar[Networks] = {"cnn": partial(photograph_cnn, 8)}
    training: ClassVar[Recommended] = {"learning_rate": 0.01, "batch_size": 64, "epochs": 1}

    def _prepare(self, arrays: Arrays) -> Prepare:  # noqa: ARG002  for subclasses
        return Images(means=(0.485, 0.456, 0.406), deviations=(0.229, 0.224, 0.225))
