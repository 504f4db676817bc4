"""FedAWE's part on the client: training starts from the client's own last model (Xiang et al.
2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from potluck.client.correction import (
    CorrectionContext,
    CorrectionOutcome,
    LocalCorrection,
    RunningCorrection,
)

START = "start"


@dataclass(frozen=True, kw_only=True)
class FedAweCorrection(LocalCorrection):
    """Replace the received parameters by the client's start before the first step.

    The start is the model after the last round that the client took part in; for a new client, the
    run's first model. Running statistics start from the round's model.
    """

    of_gradients = True

    def begin(self, context: CorrectionContext) -> RunningCorrection:
        """Set the parameters to the client's start."""
        return _OwnStart(context)


class _OwnStart:
    def __init__(self, context: CorrectionContext) -> None:
        self._parameters = context.parameters
        self._start = (context.personal or context.shared)[START]
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._start[name])

    def correct(self) -> None:
        """Leave the gradients unchanged."""

    def finish(self, normalizer: float) -> CorrectionOutcome:  # noqa: ARG002  part of the interface
        """Return the difference between the trained parameters and the start."""
        changes = {
            name: parameter.detach() - self._start[name]
            for name, parameter in self._parameters.items()
        }
        return CorrectionOutcome(send={START: changes})
