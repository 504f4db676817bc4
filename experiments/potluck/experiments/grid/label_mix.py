"""Facts about clients that an experiment knows and a coordinator may not know.

These facts are the true labels, even if a task falsifies some on purpose, and other traits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from potluck.common.learning.heterogeneity import entropy
from potluck.common.learning.sample_counts import label_counts
from potluck.common.learning.virtual_clock import pace
from potluck.common.names import ClientId
from potluck.common.task import Examples
from potluck.common.tasks.label_noise import LabelNoise
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.results import (
    DROP_OUTS,
    LABEL_ENTROPY,
    RARE_CLASSES,
    RARE_GROUPS,
    SAMPLES,
    SECONDS,
    WRONG_LABELS,
)


class LabelMix:
    """Samples and traits of a task's clients.

    counts: K × C, int64: samples by class of each client, client-0 first. traits: one number per
    client, by name.
    """

    def __init__(
        self, counts: NDArray[np.int64], traits: Mapping[str, list[float]] | None = None
    ) -> None:
        self.counts = counts
        self.traits = dict(traits or {})

    def entropy(self, clients: Sequence[str]) -> float:
        """Return the entropy of these clients' combined labels, in bits; 0 without labels."""
        rows = [int(client.rpartition("-")[2]) for client in clients]
        total = self.counts[rows].sum(axis=0, dtype=np.float64)
        return float(entropy(total) / np.log(2))


class LabelMixes:
    """The label mixes of an experiment's tasks; each task is counted once."""

    def __init__(self, data: Path | None) -> None:
        self._data = data
        self._known: dict[str, LabelMix] = {}

    def of(self, cell: Cell) -> LabelMix:
        """Return the label mix of a cell's task.

        Raises the task's errors, such as for missing data.
        """
        if cell.task_text not in self._known:
            task = cell.task()
            true = task
            # Count true labels: the split of the samples does not depend on the label noise.
            if isinstance(task, LabelNoise):
                true = replace(task, label_noise=0.0)
            clients = [ClientId(f"client-{number}") for number in range(cell.clients)]
            parts = [true.client_data(client, self._data).train for client in clients]
            counts = np.array([label_counts(part, task.classes) for part in parts], dtype=np.int64)
            traits = {SAMPLES: [float(len(part)) for part in parts]}
            traits[LABEL_ENTROPY] = [
                float(entropy(each) / np.log(2)) for each in counts.astype(np.float64)
            ]
            if isinstance(task, LabelNoise) and task.label_noise:
                told = [task.client_data(client, self._data).train.labels for client in clients]
                traits[WRONG_LABELS] = [
                    float((labels != part.labels).double().mean())
                    for labels, part in zip(told, parts, strict=True)
                ]
            traits[RARE_CLASSES] = _rare(counts)
            if task.groups > task.classes:
                traits[RARE_GROUPS] = _rare(
                    np.array([_groups(part, task.groups) for part in parts])
                )
            self._known[cell.task_text] = LabelMix(counts, traits)
        return self._known[cell.task_text]


def traits_of(cell: Cell, mix: LabelMix) -> dict[str, list[float]]:
    """Return the clients' known traits by name: one number per client, client-0 first."""
    clock, found = cell.clock, dict(mix.traits)
    clients = [f"client-{number}" for number in range(cell.clients)]
    traced = clock.trace is not None  # the clients' speeds are in the trace
    if clock.enabled and clock.draw == "client" and not traced:
        found[SECONDS] = [
            pace(clock, seed=cell.seed, client=client, round_number=0) for client in clients
        ]
    elif clock.slower and not traced:
        found[SECONDS] = [
            (clock.seconds_per_sample + clock.tail_per_sample) * clock.slowness(client)
            for client in clients
        ]
    if clock.drop_outs:
        found[DROP_OUTS] = [clock.drop_out_chance(client) for client in clients]
    return found


def _groups(part: Examples, groups: int) -> NDArray[np.int64]:
    members = np.zeros(0, dtype=np.int64) if part.groups is None else part.groups.numpy()
    return np.bincount(members, minlength=groups)


def _rare(counts: NDArray[np.int64]) -> list[float]:
    """Return each client's share of samples whose kind is rarer than the average kind.

    counts: K × kinds; a kind is a class, or a group of the task. A client without samples has 0,
    since JSON has no NaN.
    """
    total = counts.sum(axis=0)
    rare = counts[:, total < total.mean()].sum(axis=1)
    return [float(each) for each in rare / np.maximum(counts.sum(axis=1), 1)]
