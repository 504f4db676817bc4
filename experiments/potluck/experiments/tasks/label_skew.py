"""Tasks with samples in a data directory, split over clients by label."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples, Task
from potluck.common.tasks.label_noise import LabelNoise, mislabelled
from potluck.common.tasks.partition import Indices, held_out_split, part_number
from potluck.common.tasks.stored import Prepare, Stored, StoredExamples
from potluck.experiments.tasks.arrays import Arrays, DataFormat, open_arrays
from potluck.experiments.tasks.networks import Networks
from potluck.experiments.tasks.splitting import (
    Splitting,
    public_of,
    split_by,
    splitting_of,
    used,
)

_TEST_SEED = 1
"""Seed for the choice of test samples, which must not depend on the partition's seed."""


@dataclass(frozen=True, kw_only=True)
class LabelSkewTask(Splitting, LabelNoise, Task):
    """Base class of tasks split by label; subclasses set the format, networks and preparation.

    network: the model, by name. Other options are `Splitting`'s and `LabelNoise`'s.
    """

    network: str = ""

    name: ClassVar[str]
    form: ClassVar[DataFormat]
    networks: ClassVar[Networks]

    @property
    def classes(self) -> int:  # type: ignore[override]  # follows from the options
        """Number of classes in the data."""
        return self._form().classes

    def model(self) -> nn.Module:
        """Return the network."""
        return self.networks[self.network]()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Return the part of the data whose index is the number at the end of the client's id."""
        part = part_number(client, self.clients, task=self.name)
        arrays = open_arrays(self._form(), data)
        mine = _split(arrays, splitting_of(self))[part]
        train, rest = held_out_split(mine, self.held_out, np.random.default_rng((self.seed, part)))
        make = self._prepare(arrays)
        examples = stored_examples(arrays.x_train, arrays.y_train, train, make)
        labels = mislabelled(
            examples.labels,
            self,
            classes=self.classes,
            part=part,
            clients=self.clients,
            seed=self.seed,
        )
        return ClientData(
            train=examples.with_labels(labels),
            held_out=stored_examples(arrays.x_train, arrays.y_train, rest, make)
            if len(rest)
            else None,
        )

    def evaluation_data(self, data: Path | None) -> Examples | None:
        """Return the test samples."""
        arrays = open_arrays(self._form(), data)
        chosen = used(arrays.y_test, self.test_samples, np.random.default_rng(_TEST_SEED))
        return stored_examples(arrays.x_test, arrays.y_test, chosen, self._prepare(arrays))

    def public_data(self, data: Path | None) -> Tensor | None:
        """Return the training samples that were reserved as public data."""
        if not self.public:
            return None
        arrays = open_arrays(self._form(), data)
        rows = public_of(splitting_of(self), arrays.y_train)
        return stored_examples(arrays.x_train, arrays.y_train, rows, self._prepare(arrays)).inputs

    def data_files(self) -> tuple[str, ...]:
        """Return the name of the data set's file."""
        return (self._form().file_name,)

    def _form(self) -> DataFormat:
        return self.form

    def _prepare(self, arrays: Arrays) -> Prepare:
        raise NotImplementedError


@lru_cache(maxsize=4)
def _split(arrays: Arrays, options: Splitting) -> list[Indices]:
    return split_by(options, arrays.y_train)


def stored_examples(
    samples: NDArray[Any],
    labels: NDArray[np.int64],
    rows: Indices,
    prepare: Prepare,
    groups: NDArray[np.int64] | None = None,
) -> StoredExamples:
    """Return samples of a mapped array. rows: their indices. groups: their groups, n, int64."""
    return StoredExamples(
        inputs=Stored(
            array=torch.from_numpy(samples), rows=torch.from_numpy(rows), prepare=prepare
        ),
        labels=torch.from_numpy(labels[rows]),
        groups=None if groups is None else torch.from_numpy(groups),
    )
