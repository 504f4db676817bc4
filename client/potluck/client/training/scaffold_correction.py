"""SCAFFOLD's half on the client (Karimireddy et al. 2020, Algorithm 1, option II)."""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.client.correction import (
    CorrectionContext,
    CorrectionOutcome,
    LocalCorrection,
    RunningCorrection,
    Tensors,
)
from potluck.common.errors import ConfigurationError

CONTROL = "control"


class ScaffoldCorrection(LocalCorrection):
    """Steps follow ∇f_k(y) − c_k + c; afterwards c_k⁺ = c_k − c + (w − y)/(a_k·η).

    a_k is the number of steps for plain SGD. With momentum ρ it is what the steps amount to,
    without which c_k⁺ would be too large (2.6 times after 5 steps with ρ = 0.9). η is the round's
    learning rate. Where gradients are clipped, clipped ones are corrected. Buffers take no part.
    """

    def begin(self, context: CorrectionContext) -> RunningCorrection:
        """c_k is what was kept, or what the coordinator keeps; else 0."""
        if context.settings.adaptive:
            raise ConfigurationError(
                f"SCAFFOLD and optimizer {context.settings.optimizer} don't go together: control "
                "variates are read off the way taken, which Adam rescales; use sgd"
            )
        return _Running(context)


class _Running:
    def __init__(self, context: CorrectionContext) -> None:
        names = list(context.parameters)
        self._names = names
        self._parameters = [context.parameters[name] for name in names]
        self._received = [tensor.detach().clone() for tensor in self._parameters]
        common = context.shared[CONTROL]
        own = (context.personal or context.kept or {}).get(CONTROL)
        self._common = [common[name] for name in names]
        self._own = self._zeros() if own is None else [own[name] for name in names]
        # one call for all tensors, as torch's own optimisers do
        self._offsets = list(
            torch._foreach_sub(self._common, self._own)  # pyright: ignore[reportPrivateImportUsage]
        )
        self._keeps = not context.personal
        self._rate = context.settings.learning_rate_in(context.round)

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(tensor, requires_grad=False) for tensor in self._parameters]

    def correct(self) -> None:
        """g ← g − c_k + c; a parameter without a gradient has one of 0."""
        gradients: list[Tensor] = []
        offsets: list[Tensor] = []
        for parameter, offset in zip(self._parameters, self._offsets, strict=True):
            if parameter.grad is None:
                parameter.grad = offset.clone()
            else:
                gradients.append(parameter.grad)
                offsets.append(offset)
        if gradients:
            torch._foreach_add_(gradients, offsets)  # pyright: ignore[reportPrivateImportUsage]

    def finish(self, normalizer: float) -> CorrectionOutcome:
        """c_k⁺ to keep, c_k⁺ − c_k to send."""
        length = normalizer * self._rate
        send: dict[str, Tensor] = {}
        keep: dict[str, Tensor] = {}
        for index, name in enumerate(self._names):
            way = (self._received[index] - self._parameters[index].detach()) / length
            send[name] = way - self._common[index]
            # As the coordinator adds it up: its sum must stay that of all that is kept.
            keep[name] = self._own[index] + send[name]
        kept: dict[str, Tensors] | None = {CONTROL: keep} if self._keeps else None
        return CorrectionOutcome(send={CONTROL: send}, keep=kept)
