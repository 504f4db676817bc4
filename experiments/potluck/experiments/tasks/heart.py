"""Heart disease in four hospitals: 920 patients, which come with Potluck.

The data are the UCI Heart Disease data set (CC BY 4.0); `heart_data/LICENCE.txt` names its authors.
Each hospital is a client. A patient has 13 features; the label is 1 for any degree of disease.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt
from torch import nn

from potluck.common.errors import ConfigurationError
from potluck.common.models.perceptron import perceptron
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples, Recommended, Task
from potluck.common.tasks.partition import Indices, held_out_split, part_number

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
"""The hospitals in the order of client-0 … client-3."""

NUMBERS: dict[str, tuple[float, float]] = {
    "age": (50.0, 10.0),
    "trestbps": (130.0, 20.0),
    "chol": (240.0, 50.0),
    "thalach": (140.0, 25.0),
    "oldpeak": (1.0, 1.0),
    "ca": (0.0, 1.0),
}
"""(centre, scale) of each number. They are round values fixed here, not computed from the data."""

CATEGORIES: dict[str, tuple[float, ...]] = {
    "sex": (0.0, 1.0),
    "cp": (1.0, 2.0, 3.0, 4.0),
    "fbs": (0.0, 1.0),
    "restecg": (0.0, 1.0, 2.0),
    "exang": (0.0, 1.0),
    "slope": (1.0, 2.0, 3.0),
    "thal": (3.0, 6.0, 7.0),
}
"""The values of each categorical feature."""

_COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang"),
    *("oldpeak", "slope", "ca", "thal"),
)
_ZERO_IS_MISSING = ("trestbps", "chol")
INPUTS = 2 * len(NUMBERS) + sum(map(len, CATEGORIES.values()))


@dataclass(frozen=True, kw_only=True)
class Heart(Task):
    """Heart disease or none, from 13 features of a patient; a client is one of four hospitals.

    Clients are called cleveland, hungarian, switzerland and va, or by any id that ends in 0 to 3,
    in that order. network: logistic (logistic regression) or perceptron (one hidden layer of 16).
    held_out: share of its patients that each hospital evaluates on. The worst group is the
    hospital with the lowest accuracy. seed: seed of the split into training and held-out patients.

    All hospitals transform patients' data in the same way, by constants only: a number becomes
    (value − centre) / scale, a missing number becomes 0 and sets a column of its own to 1. A
    category becomes a column per value, all 0 if it is missing. A blood pressure or cholesterol of
    0 counts as missing.
    """

    network: Literal["logistic", "perceptron"] = "logistic"
    held_out: Annotated[float, Field(ge=0.1, le=0.5)] = 0.3
    seed: NonNegativeInt = 0

    classes = 2
    groups = len(HOSPITALS)
    clients = len(HOSPITALS)
    training: ClassVar[Recommended] = {"learning_rate": 0.05, "batch_size": 16, "epochs": 2}

    def model(self) -> nn.Module:
        """Return the network, for `INPUTS` columns and two classes."""
        return perceptron(INPUTS, (16,) if self.network == "perceptron" else (), 2, 0.0)

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:  # noqa: ARG002  the data are in the package
        """Return the patients of one hospital."""
        hospital = _hospital(client)
        inputs, labels = patients(HOSPITALS[hospital])
        part = np.arange(len(labels), dtype=np.int64)
        generator = np.random.default_rng((self.seed, hospital))
        train, held_out = held_out_split(part, self.held_out, generator)

        def examples(rows: Indices) -> Examples:
            return Examples(
                inputs=torch.from_numpy(inputs[rows]),
                labels=torch.from_numpy(labels[rows]),
                groups=torch.full((len(rows),), hospital, dtype=torch.int64),
            )

        return ClientData(train=examples(train), held_out=examples(held_out))

    def client_names(self, data: Path | None) -> tuple[str, ...]:  # noqa: ARG002
        """Return the names of the hospitals."""
        return HOSPITALS

    def data_files(self) -> tuple[str, ...]:
        """Return no file names: the patients' data come with Potluck."""
        return ()

    def evaluation_data(self, data: Path | None) -> Examples | None:  # noqa: ARG002
        """Return None: the hospitals evaluate, and the coordinator holds no patients."""
        return None


def _hospital(client: ClientId) -> int:
    if client in HOSPITALS:
        return HOSPITALS.index(client)
    try:
        return part_number(client, len(HOSPITALS), task="heart")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"task heart has no data for client '{client}'; name the client "
            f"{', '.join(HOSPITALS)} or client-0 … client-3",
            task="heart",
            client=client,
        ) from error


@lru_cache(maxsize=len(HOSPITALS))
def patients(hospital: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return a hospital's patients as inputs (n × `INPUTS`, float32) and labels (n, int64)."""
    path = Path(__file__).with_name("heart_data") / f"processed.{hospital}.data"
    table = np.genfromtxt(path, delimiter=",", missing_values="?", dtype=np.float64)
    values = dict(zip(_COLUMNS, table.T, strict=False))
    for name in _ZERO_IS_MISSING:
        values[name] = np.where(values[name] == 0, np.nan, values[name])
    columns: list[NDArray[np.float64]] = []
    for name, (centre, scale) in NUMBERS.items():
        missing = np.isnan(values[name])
        columns += [np.where(missing, 0.0, (values[name] - centre) / scale), missing * 1.0]
    for name, choices in CATEGORIES.items():
        columns += [(values[name] == choice) * 1.0 for choice in choices]
    return np.stack(columns, axis=1).astype(np.float32), (table[:, -1] > 0).astype(np.int64)
