"""Rounds of a strategy without processes: files and reduction are real, clients are functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.run_file.run_settings import DirectionSettings
from potluck.common.tensors.auxiliary import Auxiliaries, joined, update_layout
from potluck.common.tensors.encoding import Encoding
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.server.reduce.apply_round import RoundNumbers, apply_round, opened
from potluck.server.reduce.update_files import SpooledUpdate, UpdateFiles
from potluck.server.state import State
from potluck.server.store.records import UpdateRow
from potluck.server.strategy import Strategy

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A client's update."""

    weights: Arrays
    auxiliaries: Auxiliaries = field(default_factory=dict)
    samples: int = 1
    steps: int = 1
    normalizer: float | None = None
    loss: float = 1.0


class Rounds:
    """Rounds of a strategy in a folder; `state` and `model` are those after the last round."""

    def __init__(
        self, strategy: Strategy, model: Arrays, folder: Path, *, buffers: Sequence[str] = ()
    ) -> None:
        self.strategy = strategy
        self.model: Arrays = model
        self.state: State = strategy.init(model)
        self.number = 0
        self._folder = folder
        self._buffers = frozenset(buffers)

    def play(
        self,
        sent: Mapping[str, Sent],
        *,
        clients: int | None = None,
        weights: Mapping[str, float] | None = None,
        aside: Collection[str] = (),
    ) -> Arrays:
        """Play one round with these updates, in the order of the mapping; return the new model.

        weights: weights of the updates by client. aside: clients that the selector excludes.
        """
        self.number += 1
        layout = Layout.of(self.model)
        layout = layout.without(self.strategy.one_way)
        files = UpdateFiles(layout, DirectionSettings(), self.strategy.auxiliary)
        updates = [self._spool(layout, client, each) for client, each in sent.items()]
        path = self._folder / "model"
        write_tensors(path, self.model)
        with open_tensors(path) as current, opened(updates, files, None) as these:
            numbers = RoundNumbers(
                round=self.number,
                clients=clients or len(sent),
                buffers=self._buffers,
                weights=weights or {},
            )
            kept = these.without(aside)
            model, self.state = apply_round(self.strategy, self.state, current, kept, numbers)
            self.model = {name: np.array(array) for name, array in model.items()}
        return self.model

    def _spool(self, layout: Layout, client: str, sent: Sent) -> SpooledUpdate:
        path = self._folder / f"{client}.{self.number}"
        arrays = {**sent.weights, **joined(sent.auxiliaries)}
        names = sorted(sent.auxiliaries)
        digest = write_tensors(path, arrays, layout=update_layout(layout, Encoding.FLOAT32, names))
        row = UpdateRow(
            blake3=digest.blake3,
            size=digest.size,
            encoding="float32",
            delta=False,
            compressed=False,
            samples=sent.samples,
            steps=sent.steps,
            seconds=1.0,
            loss=sent.loss,
            normalizer=sent.normalizer,
        )
        return SpooledUpdate(client=client, path=path, row=row)


def vector(*values: float) -> dict[str, NDArray[Any]]:
    """Return a model with one tensor, `w`."""
    return {"w": np.array(values, np.float32)}
