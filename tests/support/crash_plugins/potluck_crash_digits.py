"""A task that learns well, and stops or kills a client's process before it trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from potluck_crash import Watched

from potluck.common.names import ClientId
from potluck.common.task import ClientData
from potluck.common.tasks.digits import ColoredDigits


class WatchedDigits(ColoredDigits):
    """The task `colored-digits` with the points `train-CLIENT` of the task `crash`."""

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Return the data of a client of `colored-digits`."""
        found = super().client_data(client, data)
        inputs, labels, groups = found.train.inputs, found.train.labels, found.train.groups
        point = f"train-{client}"
        return replace(
            found, train=Watched(point=point, inputs=inputs, labels=labels, groups=groups)
        )
