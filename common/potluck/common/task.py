"""The extension point for learning tasks.

A task is one small class, derived from `Task` and installed on both sides. Its constructor takes
its options (from the run file's `[task]` table) as keyword arguments and only stores them; their
annotations define which values are allowed. The coordinator builds the initial model and evaluates;
hosts load their clients' data and train. A task without its own trainer is a classification task,
whose data are `Examples`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from typing_extensions import TypeVar

from potluck.common.names import ClientId
from potluck.common.settings.plugins import TASKS, Plugin
from potluck.common.trainer import Trainer

if TYPE_CHECKING:  # importing torch takes seconds, and most commands load no task
    import torch
    from torch import Tensor


Recommended = Mapping[str, object]
"""Recommended settings by name, used for settings that a run does not choose."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Labelled samples.

    inputs: n × …, tensor that the model takes. labels: n, int64, in [0, classes). groups: n, int64,
    in [0, groups), or None if the task does not define groups.
    """

    inputs: Tensor
    labels: Tensor
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def inputs_at(self, positions: Tensor) -> Tensor:
        """Return the inputs of some samples, b × …; positions: b, int64, on the device of `labels`.

        Training and evaluation read inputs through this method. So samples stored in another form
        (`tasks.stored`) are converted to inputs one batch at a time.
        """
        return self.inputs.index_select(0, positions)

    def subset(self, positions: Tensor) -> Examples:
        """Return some of the samples; positions: b, int64, on the device of `labels`."""
        return Examples(
            inputs=self.inputs.index_select(0, positions),
            labels=self.labels.index_select(0, positions),
            groups=None if self.groups is None else self.groups.index_select(0, positions),
        )

    def to(self, device: torch.device) -> Examples:
        """Return the same samples on another device."""
        groups = None if self.groups is None else self.groups.to(device)
        return Examples(inputs=self.inputs.to(device), labels=self.labels.to(device), groups=groups)


Data = TypeVar("Data", default=Examples)


@dataclass(frozen=True, kw_only=True)
class ClientData(Generic[Data]):
    """A client's samples: for training and, optionally, held out for evaluation.

    Classification tasks have `Examples`; other tasks have any data that their trainer accepts.
    """

    train: Data
    held_out: Data | None = None


class Task(Plugin):
    """A learning task.

    Its methods run in worker threads and may block; they must be deterministic.
    """

    group = TASKS

    classes: int = 0
    """Number of classes; 0 if a task with its own trainer has none."""
    groups: int = 0
    """Number of groups for worst-group accuracy; 0 if the task has no groups."""
    clients: int = 0
    """Number of clients for which there are data; a run that expects more clients is refused. 0:
    any number."""
    needs_data: ClassVar[bool] = False
    """True if clients have no data without a data directory."""
    training: ClassVar[Recommended] = {}
    """Settings of local training, as in the run file's `[training]`."""
    triplet: ClassVar[Recommended] = {}
    """Settings of the triplet estimate, as in the run file's `[profiles.triplet]`."""

    @abstractmethod
    def model(self) -> Any:
        """Return a new model: a `torch.nn.Module`, or a dict of named numpy arrays for a trainer.

        Draw a module's initial weights from torch's global generator, and arrays from numpy's
        global generator. Both are seeded before the call.
        """

    @abstractmethod
    def client_data(self, client: ClientId, data: Path | None) -> ClientData[Any]:
        """Return the data of one client. data: the host's data directory; None if it has none.

        Raises ConfigurationError if the client has no data, or if files are missing.
        """

    @abstractmethod
    def evaluation_data(self, data: Path | None) -> Any:
        """Return the coordinator's own held-out samples; None if it has none."""

    def public_data(self, data: Path | None) -> Tensor | None:  # noqa: ARG002  for subclasses
        """Return public inputs without labels, n × …, on the coordinator; None if there are none.

        Public inputs belong to no client, and are not part of the evaluation data.
        """
        return None

    def public_labels(self, data: Path | None) -> Tensor | None:  # noqa: ARG002  for subclasses
        """Return the labels of `public_data`, n, int64, in the same order; None if it has none."""
        return None

    def data_files(self) -> tuple[str, ...] | None:
        """Return the names of the files and folders that the task reads in a data directory.

        Return None if the task may read any file. If an experiment runs on other machines, only
        these files are sent there.
        """
        return None

    def trainer(self) -> Trainer | None:
        """Return the task's own trainer; None for the built-in loop of classification."""
        return None
