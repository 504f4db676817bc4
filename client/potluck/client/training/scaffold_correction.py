"""SCAFFOLD's correction on the client (Karimireddy et al. 2020, Algorithm 1, option II)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, kw_only=True)
class ScaffoldCorrection(LocalCorrection):
    """Steps follow ∇f_k(y) − c_k + c; afterwards c_k⁺ is the mean of the gradients ∇f_k(y).

    control: how that mean is computed. `way`: from the update, as in the paper, as
    c_k − c + (w − y)/(a_k·η). For plain SGD, a_k is the number of steps. With momentum ρ, a_k is
    the effective number of steps; with the plain number, c_k⁺ would be too large (2.6 times after 5
    steps with ρ = 0.9). η is the round's learning rate. `gradients`: adds up the gradients of all
    steps, for any optimiser. The result for plain SGD is the same; it needs memory for another copy
    of the model.
    Gradients are corrected after clipping. Buffers are not corrected.
    """

    control: Literal["way", "gradients"] = "way"

    of_gradients = True

    def begin(self, context: CorrectionContext) -> RunningCorrection:
        """Begin with the c_k that the client or the coordinator has stored; 0 if there is none."""
        if self.control == "gradients":
            return _Adding(context)
        if context.settings.adaptive:
            raise ConfigurationError(
                f"SCAFFOLD is not compatible with the optimizer {context.settings.optimizer}: "
                "control variates are computed from the weight change, in which Adam rescales "
                'the gradients; use sgd, or control = "gradients"'
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
        # One call for all tensors is faster; torch's own optimisers do the same.
        self._offsets = list(
            torch._foreach_sub(self._common, self._own)  # pyright: ignore[reportPrivateImportUsage]
        )
        self._keeps = not context.personal
        self._rate = context.settings.learning_rate_in(context.round)

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(tensor, requires_grad=False) for tensor in self._parameters]

    def correct(self) -> None:
        """Set g ← g − c_k + c; a missing gradient counts as 0."""
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
        """Return c_k⁺, to be kept, and c_k⁺ − c_k, to be sent."""
        send: dict[str, Tensor] = {}
        keep: dict[str, Tensor] = {}
        for index, (name, change) in enumerate(
            zip(self._names, self._changes(normalizer), strict=True)
        ):
            send[name] = change
            # Add the change as sent, so that the clients' c_k add up to the coordinator's sum.
            keep[name] = self._own[index] + send[name]
        kept: dict[str, Tensors] | None = {CONTROL: keep} if self._keeps else None
        return CorrectionOutcome(send={CONTROL: send}, keep=kept)

    def _changes(self, normalizer: float, /) -> Iterator[Tensor]:
        """Yield c_k⁺ − c_k, tensor by tensor."""
        length = normalizer * self._rate
        ways = zip(self._received, self._parameters, self._common, strict=True)
        for received, parameter, common in ways:
            yield (received - parameter.detach()) / length - common


class _Adding(_Running):
    """The variant `gradients`, which adds up the gradients of all steps."""

    def __init__(self, context: CorrectionContext) -> None:
        super().__init__(context)
        self._received = []  # this variant does not need the received tensors
        self._sums, self._steps = self._zeros(), 0

    def correct(self) -> None:
        """Add the gradients up before they are corrected."""
        for total, parameter in zip(self._sums, self._parameters, strict=True):
            if parameter.grad is not None:
                total.add_(parameter.grad)
        self._steps += 1
        super().correct()

    def _changes(self, _: float, /) -> Iterator[Tensor]:
        for total, own in zip(self._sums, self._own, strict=True):
            yield total / self._steps - own
