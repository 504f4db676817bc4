"""The seam for learning tasks.

A task is one small class, derived from `Task` and installed on both sides. Its constructor takes
its options (from the run file's `[task]` table) as keyword arguments and only stores them; their
annotations say what they may be. The coordinator builds the initial model and evaluates; hosts
load their clients' data and train.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from potluck.common.names import ClientId
from potluck.common.settings.plugins import TASKS, Plugin

if TYPE_CHECKING:  # importing torch takes seconds, and most commands load no task
    import torch
    from torch import Tensor, nn


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


@dataclass(frozen=True, kw_only=True)
class ClientData:
    """A client's samples: those it trains on and, optionally, some it holds out to evaluate on."""

    train: Examples
    held_out: Examples | None = None


class Task(Plugin):
    """A learning task. Called from worker threads; may block; deterministic."""

    group = TASKS

    classes: int
    """Number of classes."""
    groups: int = 0
    """Number of groups for worst-group accuracy; 0 where there are none."""
    clients: int = 0
    """For how many clients there are data: a larger roster is refused. 0 where any number has."""
    training: ClassVar[Recommended] = {}
    """Settings of local training, as in the run file's `[training]`."""
    triplet: ClassVar[Recommended] = {}
    """Settings of the triplet estimate, as in the run file's `[profiles.triplet]`."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model; its initial weights come from torch's global generator, seeded before."""

    @abstractmethod
    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """The data of one client; `data` is the host's data directory, if it has one.

        Raises ConfigurationError if the client has none, or if files are missing.
        """

    @abstractmethod
    def evaluation_data(self, data: Path | None) -> Examples | None:
        """The coordinator's own held-out samples; None if it has none."""
