"""The samples that a client holds back from training, and a model's loss on samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from potluck.client.training.objectives.noise_robust import noise_robust_loss
from potluck.common.names import ClientId
from potluck.common.task import Examples

_AT_ONCE = 1024


def validation_split(
    examples: Examples, share: float, client: ClientId
) -> tuple[Examples, Examples]:
    """Split into training and validation samples; validation gets ⌊share · n⌋, at least 1 if n ≥ 2.

    The split is random with the client's id as the seed, so it is the same in every round and run.
    """
    if share <= 0:
        return examples, examples.subset(torch.zeros(0, dtype=torch.int64))
    digest = hashlib.sha256(f"validation/{client}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    shuffled = torch.randperm(len(examples), generator=generator)
    kept_back = min(max(1, int(share * len(examples))), len(examples) - 1)
    cut = len(examples) - max(0, kept_back)
    return examples.subset(shuffled[:cut].sort()[0]), examples.subset(shuffled[cut:].sort()[0])


def mean_loss(model: nn.Module, examples: Examples, *, device: torch.device) -> float:
    """Return the mean cross-entropy; NaN without samples.

    Leaves the model on `device`, in evaluation mode.
    """
    return _mean(model, examples, device, cross_entropy)


def mean_robust_loss(
    model: nn.Module, examples: Examples, *, alpha: float, beta: float, device: torch.device
) -> float:
    """Return the mean of FLASH's loss, with the model's own predictions as pseudo-labels.

    It is the initial loss of a training that starts from this model. Otherwise as `mean_loss`.
    """

    return _mean(model, examples, device, robust_loss(alpha, beta))


def robust_loss(alpha: float, beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that gives FLASH's loss of each sample from logits and labels."""

    def robust(logits: Tensor, labels: Tensor) -> Tensor:
        return noise_robust_loss(logits, labels, functional.softmax(logits, dim=1), alpha, beta)

    return robust


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each sample."""
    return functional.cross_entropy(logits, labels, reduction="none")


def _mean(
    model: nn.Module,
    examples: Examples,
    device: torch.device,
    losses: Callable[[Tensor, Tensor], Tensor],
) -> float:
    if len(examples) == 0:
        return float("nan")
    model.to(device).eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    with torch.inference_mode():
        positions = torch.arange(len(examples), device=examples.labels.device)
        for batch in torch.split(positions, _AT_ONCE):
            labels = examples.labels.index_select(0, batch).to(device)
            logits = model(examples.inputs_at(batch).to(device))
            total += losses(logits.double(), labels).sum()
    return float(total) / len(examples)
