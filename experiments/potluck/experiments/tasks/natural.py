"""Tasks whose clients are given by the data: speakers, writers, hospitals."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt
from torch import nn

from potluck.common.errors import ConfigurationError
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples, Task
from potluck.common.tasks.partition import Indices, part_number
from potluck.common.tasks.stored import Prepare
from potluck.experiments.tasks.arrays import Arrays, DataFormat, open_arrays
from potluck.experiments.tasks.label_skew import stored_examples
from potluck.experiments.tasks.networks import Networks


@runtime_checkable
class NamedClients(Protocol):
    """A task whose clients have names in the data."""

    def client_names(self, data: Path | None) -> tuple[str, ...]:
        """Return the names of client-0, client-1 …"""
        ...


@dataclass(frozen=True, kw_only=True)
class NaturalTask(Task):
    """Base class of tasks with natural clients; subclasses set the format, networks, preparation.

    clients: number of clients, the first ones of the file. network: the model, by name. evaluation:
    place of the test samples: each client's at the client, or all at the coordinator, which is
    faster but only possible in a simulation. every: use every n-th sample of each client, for
    shorter runs; 1 uses all.
    """

    clients: NonNegativeInt = 0
    network: str = ""
    every: PositiveInt = 1
    evaluation: Literal["clients", "coordinator"] = "clients"

    name: ClassVar[str]
    form: ClassVar[DataFormat]
    networks: ClassVar[Networks]
    grouped: ClassVar[bool] = False
    """True if each client is a group, for the accuracy of the worst client."""

    @property
    def classes(self) -> int:  # type: ignore[override]  # follows from the format
        """Number of classes in the data."""
        return self.form.classes

    @property
    def groups(self) -> int:  # type: ignore[override]  # follows from the options
        """Number of groups: one per client, or 0."""
        return self.clients if self.grouped else 0

    def model(self) -> nn.Module:
        """Return the network."""
        return self.networks[self.network]()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Return the samples of the client with the number at the end of the client's id."""
        arrays = self._arrays(data)
        part = part_number(client, self.clients, task=self.name)
        test = self._rows(arrays, "test")[part]
        at_client = self.evaluation == "clients" and len(test)
        return ClientData(
            train=self._examples(arrays, "train", self._rows(arrays, "train")[part]),
            held_out=self._examples(arrays, "test", test) if at_client else None,
        )

    def client_names(self, data: Path | None) -> tuple[str, ...]:
        """Return the names of client-0, client-1 … in the data set."""
        return self._arrays(data).names[: self.clients]

    def evaluation_data(self, data: Path | None) -> Examples | None:
        """Return all clients' test samples; None if the clients evaluate."""
        if self.evaluation == "clients":
            return None
        arrays = self._arrays(data)
        rows = self._rows(arrays, "test")[: self.clients]
        return self._examples(arrays, "test", np.sort(np.concatenate(rows)))

    def data_files(self) -> tuple[str, ...]:
        """Return the name of the data set's file."""
        return (self.form.file_name,)

    def _prepare(self, arrays: Arrays) -> Prepare:
        raise NotImplementedError

    def _arrays(self, data: Path | None) -> Arrays:
        arrays = open_arrays(self.form, data)
        if self.clients > len(arrays.names):
            raise ConfigurationError(
                f"task {self.name} has {self.clients} clients, but its file has samples of "
                f"{len(arrays.names)} clients; set the task's option 'clients' to "
                f"{len(arrays.names)} or fewer",
                task=self.name,
            )
        return arrays

    def _rows(self, arrays: Arrays, split: Literal["train", "test"]) -> list[Indices]:
        return [rows[:: self.every] for rows in _rows_by_client(arrays, split)]

    def _examples(self, arrays: Arrays, split: Literal["train", "test"], rows: Indices) -> Examples:
        samples, labels, clients = _split_arrays(arrays, split)
        groups = clients[rows] if self.grouped else None
        return stored_examples(samples, labels, rows, self._prepare(arrays), groups)


Split = tuple[NDArray[np.generic], NDArray[np.int64], NDArray[np.int64]]


def _split_arrays(arrays: Arrays, split: Literal["train", "test"]) -> Split:
    """Return samples, labels and client numbers of a split."""
    if split == "train":
        found = (arrays.x_train, arrays.y_train, arrays.c_train)
    else:
        found = (arrays.x_test, arrays.y_test, arrays.c_test)
    samples, labels, clients = found
    if clients is None:  # can't happen: the format requires them
        raise ConfigurationError(f"the {split} samples have no client numbers")
    return samples, labels, clients


@lru_cache(maxsize=8)
def _rows_by_client(arrays: Arrays, split: Literal["train", "test"]) -> list[Indices]:
    """Return the sorted positions of each client's samples."""
    clients = _split_arrays(arrays, split)[2]
    order = np.argsort(clients, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(clients, minlength=len(arrays.names)))
    return np.split(order, ends[:-1])
