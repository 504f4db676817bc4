"""A task whose data have the fault that its option names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples

SAMPLES = 20


class _Torn(Examples):
    """Samples that raise OSError when a batch reads them."""

    def inputs_at(self, positions: Tensor) -> Tensor:
        """Raise the error of a file on a disconnected network share."""
        raise OSError(5, "Input/output error", "/mnt/share/scan.npy")

    def to(self, device: torch.device) -> Examples:
        """Return the same samples."""
        return self


@dataclass(frozen=True, kw_only=True)
class Task:
    """Digits' model and 20 samples. fault: none, missing, odd (no errno), torn, labels, groups,
    nan or nan-held-out."""

    fault: str = "none"

    classes = 10
    groups = 0

    def model(self) -> nn.Module:
        """Return the model of the task `digits`."""
        from potluck.common.tasks.digits import Digits

        return Digits().model()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Return 20 samples with the fault."""
        if self.fault == "missing":
            Path("/nowhere/features.npy").read_bytes()
        if self.fault == "odd":
            raise OSError("this image\nis truncated")
        inputs, labels = torch.ones(SAMPLES, 64), torch.zeros(SAMPLES, dtype=torch.int64)
        groups = torch.zeros(SAMPLES - 2, dtype=torch.int64) if self.fault == "groups" else None
        if self.fault == "nan":
            inputs[17, 3] = torch.nan
        if self.fault == "labels":
            labels = labels[:-1]
        kind = _Torn if self.fault == "torn" else Examples
        held_out = torch.full((SAMPLES, 64), torch.nan if "held-out" in self.fault else 1.0)
        return ClientData(
            train=kind(inputs=inputs, labels=labels, groups=groups),
            held_out=Examples(inputs=held_out, labels=torch.zeros(SAMPLES, dtype=torch.int64)),
        )

    def evaluation_data(self, data: Path | None) -> Examples | None:
        """Return None: the clients evaluate."""
        return None
