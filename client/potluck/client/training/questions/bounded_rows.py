"""Sums over a client's samples to which each sample adds a vector of bounded length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from potluck.client.question import QuestionContext
from potluck.common.errors import DeviceMemoryError, RoundClosedError, TrainingError
from potluck.common.task import Examples

Rows = Callable[[Tensor, Tensor], Tensor]
"""Function of inputs (b × …) and labels (b) that returns a row per sample: b × d."""

AT_ONCE: Final = 256
_NUMBERS_AT_ONCE: Final = 2**24
"""Maximum number of gradient values in memory at once."""
_SHRUNK: Final = 1 - 2.0**-20
"""Factor on the bound: leaves room for the rounding of floating-point numbers."""


def bounded_sum(
    context: QuestionContext, kind: str, rows: Rows, *, clip: float, at_once: int = AT_ONCE
) -> Tensor:
    """Return the sum over the client's training samples of their rows: float64, length d.

    Each row is first scaled down to the L2 norm `clip`. So adding or removing a sample changes the
    sum by at most `clip` (L2 norm). A row with NaN or infinity counts as zeros, and so does the row
    of a sample at which `rows` fails. The model is in evaluation mode, on the context's device.

    kind: kind of the question, for error messages. at_once: maximum number of samples in a call of
    `rows`.
    Raises TrainingError without samples, and if `rows` fails for an input of zeros.
    """
    context.require_examples(kind)
    samples, device = context.data.train, torch.device(context.device)
    if not len(samples):
        raise TrainingError(f"client '{context.client}' has no training samples")
    context.model.to(device).eval()
    total = _zeros(samples, kind, rows, device)
    for batch in torch.split(torch.arange(len(samples), device=samples.labels.device), at_once):
        if context.cancelled():
            raise RoundClosedError("the question was withdrawn; no run waits for the answer")
        _add(total, samples, batch, rows, clip)
    return total.cpu()


def _zeros(samples: Examples, kind: str, rows: Rows, device: torch.device) -> Tensor:
    """Return a sum of zeros; compute one row to find out its length."""
    one = torch.zeros(1, dtype=torch.int64, device=samples.labels.device)
    try:
        inputs = torch.zeros_like(samples.inputs_at(one)).to(device)
        found = rows(inputs, one.to(device))
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise TrainingError(
            f"question '{kind}' can't be answered with noise for this model: {text}; choose "
            "another model or selector, or remove [privacy]"
        ) from error
    return torch.zeros(found.shape[1], dtype=torch.float64, device=device)


def _add(total: Tensor, samples: Examples, batch: Tensor, rows: Rows, clip: float) -> None:
    """Add the bounded rows of some samples; try again in halves if the computation fails."""
    labels = samples.labels.index_select(0, batch).to(total.device)
    try:
        found = rows(samples.inputs_at(batch).to(total.device), labels)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{total.device} has too little memory to answer a question with noise; use a smaller "
            "model, or a device with more memory",
            device=str(total.device),
        ) from error
    except Exception:  # a failing record adds nothing: an error would reveal it
        half = len(batch) // 2
        if half:
            _add(total, samples, batch[:half], rows, clip)
            _add(total, samples, batch[half:], rows, clip)
        return
    total += bounded(found, clip).sum(dim=0)


def bounded(rows: Tensor, clip: float) -> Tensor:
    """Return rows scaled down to the L2 norm `clip`, float64; rows that aren't finite are zeros."""
    wide = rows.detach().double()
    lengths = wide.norm(dim=1, keepdim=True)
    scaled = wide * (clip * _SHRUNK / lengths).clamp(max=1.0)
    return torch.where(lengths.isfinite(), scaled, torch.zeros_like(scaled))


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
