"""The true labels of a task's clients, also where a task makes some wrong on purpose; an experiment
may know them, a coordinator may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from potluck.client.training.samples.signals import label_counts
from potluck.common.learning.heterogeneity import entropy
from potluck.common.names import ClientId
from potluck.common.tasks.label_noise import LabelNoise
from potluck.experiments.grid.grid_cells import Cell


class LabelMix:
    """counts: K × C, int64: samples by class of each client, client-0 first."""

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self.counts = counts

    def entropy(self, clients: Sequence[str]) -> float:
        """Entropy of these clients' labels together, in bits; 0 without any."""
        rows = [int(client.rpartition("-")[2]) for client in clients]
        total = self.counts[rows].sum(axis=0, dtype=np.float64)
        return float(entropy(total) / np.log(2))


class LabelMixes:
    """The label mixes of an experiment's tasks; each task is counted once."""

    def __init__(self, data: Path | None) -> None:
        self._data = data
        self._known: dict[str, LabelMix] = {}

    def of(self, cell: Cell) -> LabelMix:
        """The label mix of a cell's task. Raises what the task raises, as for missing data."""
        if cell.task_text not in self._known:
            task = cell.task()
            if isinstance(task, LabelNoise):  # which samples a client has does not depend on it
                task = replace(task, label_noise=0.0)
            counts = [
                label_counts(
                    task.client_data(ClientId(f"client-{number}"), self._data).train, task.classes
                )
                for number in range(cell.clients)
            ]
            self._known[cell.task_text] = LabelMix(np.array(counts, dtype=np.int64))
        return self._known[cell.task_text]
