"""The gradient of each single sample's loss, as one row per sample."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from potluck.client.training.questions.bounded_rows import AT_ONCE, Rows

_NUMBERS_AT_ONCE: Final = 2**24
"""Maximum number of gradient values in memory at once."""


def sample_gradients(model: nn.Module) -> tuple[Rows, int]:
    """Return a function that gives the gradient of each sample's cross-entropy as a row.

    The gradients are with respect to the trainable parameters. Also return the number of samples to
    pass in one call of the function.
    """
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    numbers = max(1, sum(each.numel() for each in trained.values()))

    def rows(inputs: Tensor, labels: Tensor) -> Tensor:
        # Read the parameters at each call, since the caller moves the model to its device before
        # the first call.
        moved = {name: p.detach() for name, p in model.named_parameters()}
        fixed = {name: each for name, each in moved.items() if name not in trained}
        fixed |= {name: each.detach() for name, each in model.named_buffers()}

        def loss(parameters: Any, sample: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(model, {**fixed, **parameters}, (sample[None],))
            return functional.cross_entropy(logits, label[None])

        each = vmap(grad(loss), in_dims=(None, 0, 0))(
            {name: moved[name] for name in trained}, inputs, labels
        )
        return torch.cat([each[name].flatten(1) for name in trained], dim=1)

    return rows, max(1, min(AT_ONCE, _NUMBERS_AT_ONCE // numbers))
