"""The seam for learning tasks.

A task is one small class, derived from `Task` and installed on both sides. Its constructor takes
its options (from the run file's `[task]` table) as keyword arguments and only stores them; their
annotations say what they may be. The coordinator builds the initial model and evaluates; hosts
load their clients' data and train. A task that brings no trainer is a classification task, whose
data are `Examples`.
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
"""Settings by name, for runs that choose none themselves."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Labelled samples.

    inputs: n × … tensor the model takes. labels: n, int64, in [0, classes).
    groups: n, int64, in [0, groups), or None where the task knows no groups.
    """

    inputs: Tensor
    labels: Tensor
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def inputs_at(self, positions: Tensor) -> Tensor:
        """The inputs of some samples, b × …; positions: b, int64, on the device of `labels`.

        What training and evaluation read, so that samples that are stored in another form
        (`tasks.stored`) are turned into inputs a batch at a time.
        """
        return self.inputs.index_select(0, positions)

    def subset(self, positions: Tensor) -> Examples:
        """Some of the samples; positions: b, int64, on the device of `labels`."""
        return Examples(
            inputs=self.inputs.index_select(0, positions),
            labels=self.labels.index_select(0, positions),
            groups=None if self.groups is None else self.groups.index_select(0, positions),
        )

    def to(self, device: torch.device) -> Examples:
        """The same samples on another device."""
        groups = None if self.groups is None else self.groups.to(device)
        return Examples(inputs=self.inputs.to(device), labels=self.labels.to(device), groups=groups)


Data = TypeVar("Data", default=Examples)


@dataclass(frozen=True, kw_only=True)
class ClientData(Generic[Data]):
    """A client's samples: those it trains on and, optionally, some it holds out to evaluate on.

    `Examples` of classification tasks; of others whatever their trainer takes.
    """

    train: Data
    held_out: Data | None = None


class Task(Plugin):
    """A learning task. Called from worker threads; may block; deterministic."""

    group = TASKS

    classes: int = 0
    """Number of classes; 0 where a task with a trainer of its own has none."""
    groups: int = 0
    """Number of groups for worst-group accuracy; 0 where there are none."""
    clients: int = 0
    """For how many clients there are data: a larger roster is refused. 0 where any number has."""
    needs_data: ClassVar[bool] = False
    """True if clients have no data without a data directory."""
    training: ClassVar[Recommended] = {}
    """Settings of local training, as in the run file's `[training]`."""
    triplet: ClassVar[Recommended] = {}
    """Settings of the triplet estimate, as in the run file's `[profiles.triplet]`."""

    @abstractmethod
    def model(self) -> Any:
        """A new model: a `torch.nn.Module`, or a dict of named numpy arrays for a trainer.

        The initial weights of a module come from torch's global generator, seeded before; those of
        arrays from that of numpy, likewise.
        """

    @abstractmethod
    def client_data(self, client: ClientId, data: Path | None) -> ClientData[Any]:
        """The data of one client; `data` is the host's data directory, if it has one.

        Raises ConfigurationError if the client has none, or if files are missing.
        """

    @abstractmethod
    def evaluation_data(self, data: Path | None) -> Any:
        """The coordinator's own held-out samples; None if it has none."""

    def public_data(self, data: Path | None) -> Tensor | None:  # noqa: ARG002  part of the seam
        """Inputs without labels, n × …, that lie on the coordinator and are nobody's secret.

        They are neither any client's nor part of the evaluation data. None if there are none.
        """
        return None

    def data_files(self) -> tuple[str, ...] | None:
        """Names of the files and folders that it reads in a data directory; None if it may be any.

        Only these are sent to other machines where an experiment runs there.
        """
        return None

    def trainer(self) -> Trainer | None:
        """Its own way to train and to measure; None for the built-in loop of classification."""
        return None
