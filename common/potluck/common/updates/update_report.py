"""The record of a client's report about a training, and its conversion to and from messages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck.common.trainer import Measured
from potluck.rpc.v1 import transfer_pb2


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """A client's report of one training, as sent to the coordinator and stored in its database.

    Each field is a field of `TrainingReport` and a column of the table `members`.

    samples: number of samples, in the precision that the client discloses. steps: number of
    optimiser steps. seconds: duration of the training; on a virtual clock, the simulated one. loss:
    mean loss over the last pass. normalizer: FedNova's a_k (`local_steps.py`); None from a host
    that does not report it. reports: the numbers that the run's selector requested, by name.
    measures: measures that a task's own trainer took in the training, by name. A masked update has
    no report.
    """

    samples: int = 0
    steps: int = 0
    seconds: float = 0.0
    loss: float | None = None
    normalizer: float | None = None
    reports: Mapping[str, float] = field(default_factory=dict)
    measures: Mapping[str, Measured] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: transfer_pb2.TrainingReport) -> UpdateReport:
        """Return the report in a message."""
        said = {
            name: getattr(message, name)
            for name, described in message.DESCRIPTOR.fields_by_name.items()
            if not described.has_presence or message.HasField(name)  # type: ignore[arg-type]  # the stubs want literals
        }
        said |= {
            "normalizer": message.normalizer or None,
            "reports": dict(message.reports),
            "measures": measured(message.measures),
        }
        return cls(**said)

    def message(self) -> transfer_pb2.TrainingReport:
        """Return the message for this report."""
        sums: Any = {
            name: transfer_pb2.MeasuredSum(sum=each.sum, count=each.count)
            for name, each in self.measures.items()
        }
        return transfer_pb2.TrainingReport(**self.values() | {"measures": sums})

    def values(self) -> dict[str, Any]:
        """Return the reported values by name, without fields that a subclass adds."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(UpdateReport)}

    def not_finite(self) -> Mapping[str, float]:
        """Return the fields that are NaN or infinite, by name; `reports` is not checked."""
        return {
            name: value
            for name, value in self.values().items()
            if isinstance(value, float) and not math.isfinite(value)
        }


def measured(sums: Mapping[str, transfer_pb2.MeasuredSum]) -> dict[str, Measured]:
    """Return the measures in a message, by name, without checking them."""
    return {name: Measured(each.sum, each.count) for name, each in sums.items()}
