"""Samples that stay in a data file, and are converted to a model's inputs one batch at a time.

All clients of a host, and all processes of a machine, share one read-only mapping of the data file.
A client needs memory for the positions of its samples, not for a copy of the samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from potluck.common.task import Examples

Prepare = Callable[[Tensor, Tensor | None], Tensor]
"""Pure function: (stored samples b × …, their groups or None) → inputs b × …, float32."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Some samples of a data file.

    array: N × …, all samples of the file (a view of the mapping). rows: n, int64, positions of the
    chosen samples in `array`. prepare: function that converts samples to inputs.
    """

    array: Tensor
    rows: Tensor
    prepare: Prepare

    def inputs(self, positions: Tensor, groups: Tensor | None) -> Tensor:
        """Return the inputs of some of the chosen samples. positions: b, int64, in [0, n)."""
        samples = self.array.index_select(0, self.rows.index_select(0, positions))
        chosen = None if groups is None else groups.index_select(0, positions)
        return self.prepare(samples, chosen)

    def to(self, device: torch.device) -> Stored:
        """Return the samples on another device. Only the chosen samples of the file are copied to
        it."""
        if device == self.array.device:
            return self
        samples = self.array.index_select(0, self.rows).to(device)
        rows = torch.arange(len(self.rows), device=device)
        return replace(self, array=samples, rows=rows)


class StoredExamples(Examples):
    """Labelled samples whose inputs are computed on access.

    Each access to `inputs` computes all inputs; `inputs_at` computes only a batch's inputs.
    """

    def __init__(
        self, *, inputs: Tensor | Stored, labels: Tensor, groups: Tensor | None = None
    ) -> None:
        """labels, groups: as in `Examples`. inputs: may also be a tensor, as `dataclasses.replace`
        passes it."""
        if isinstance(inputs, Tensor):
            rows = torch.arange(len(inputs), device=inputs.device)
            inputs = Stored(array=inputs, rows=rows, prepare=lambda samples, _: samples)
        object.__setattr__(self, "stored", inputs)
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "groups", groups)

    stored: Stored

    @property
    def inputs(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
        """All inputs, n × …."""
        return self.inputs_at(torch.arange(len(self), device=self.labels.device))

    def inputs_at(self, positions: Tensor) -> Tensor:
        """Return the inputs of some samples."""
        return self.stored.inputs(positions, self.groups)

    def subset(self, positions: Tensor) -> StoredExamples:
        """Return only the samples at these positions."""
        rows = self.stored.rows.index_select(0, positions)
        return StoredExamples(
            inputs=replace(self.stored, rows=rows),
            labels=self.labels.index_select(0, positions),
            groups=None if self.groups is None else self.groups.index_select(0, positions),
        )

    def to(self, device: torch.device) -> StoredExamples:
        """Return the same samples on another device."""
        return StoredExamples(
            inputs=self.stored.to(device),
            labels=self.labels.to(device),
            groups=None if self.groups is None else self.groups.to(device),
        )

    def with_labels(self, labels: Tensor) -> StoredExamples:
        """Return the same samples with other labels (n, int64)."""
        return StoredExamples(inputs=self.stored, labels=labels, groups=self.groups)
