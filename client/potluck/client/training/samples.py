"""A client's samples: their choice for a training, their cache on a GPU, their validation split."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from potluck.client.training.objectives.noise_robust import noise_robust_loss
from potluck.common.errors import ProtocolError, TrainingError
from potluck.common.names import ClientId
from potluck.common.task import Examples
from potluck.common.tasks.stored import StoredExamples

# Quotas -------------------------------------------------------------------------------------------


def positions_within(
    examples: Examples, quotas: Sequence[float], *, classes: int, seed: int
) -> Tensor | None:
    """Return the positions of at most ⌊quotas[c]⌋ samples of each class c, in ascending order.

    int64, on the labels' device; None stands for all samples, for example if `quotas` is empty. The
    samples are drawn uniformly with the training's seed. Raises ProtocolError for invalid quotas,
    TrainingError if no sample is left.
    """
    if not quotas:
        return None
    if len(quotas) != classes or any(math.isnan(quota) or quota < 0 for quota in quotas):
        raise ProtocolError(
            f"the coordinator sent the quotas {list(quotas)[:20]}; the task needs {classes} "
            "numbers ≥ 0"
        )
    labels = examples.labels.cpu()
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    keep = torch.zeros(len(labels), dtype=torch.bool)
    for label, quota in enumerate(quotas):
        mine = shuffled[labels[shuffled] == label]
        keep[mine[: int(min(quota, len(mine)))]] = True
    if not bool(keep.any()):
        raise TrainingError(
            "the selector's quotas exclude all samples of the client; the client's label counts "
            "were noisy or are out of date"
        )
    if bool(keep.all()):
        return None
    return keep.nonzero()[:, 0].to(examples.labels.device)


# Samples on a GPU ---------------------------------------------------------------------------------

SHARE_OF_MEMORY = 0.25
"""Share of a GPU's memory for samples; the rest is for models and their activations."""


class DeviceSamples:
    """Cache of samples on a device; when it is full, it drops the least recently used samples."""

    def __init__(
        self, device: torch.device, *, capacity: int | None = None, sharing: int = 1
    ) -> None:
        """`capacity`: bytes; by default a quarter of a GPU's memory, divided by the number of
        processes that share it. 0 on a CPU, where the samples are in main memory already."""
        if capacity is None:
            on_gpu = device.type == "cuda"
            total = torch.cuda.mem_get_info(device)[1] if on_gpu else 0
            capacity = int(total * SHARE_OF_MEMORY / sharing)
        self._device, self._capacity = device, capacity
        self._kept: OrderedDict[Hashable, Examples] = OrderedDict()

    def of(self, key: Hashable, examples: Examples) -> Examples:
        """Return the samples on the device, cached under `key`; unchanged if they don't fit."""
        kept = self._kept.get(key)
        if kept is None:
            size = bytes_of(examples)
            if size > self._capacity:
                return examples  # too large for the cache: each training copies them
            self._make_room(size)
            kept = self._kept[key] = examples.to(self._device)
        self._kept.move_to_end(key)
        return kept

    def _make_room(self, size: int) -> None:
        total = sum(map(bytes_of, self._kept.values()))
        while total + size > self._capacity:
            _, dropped = self._kept.popitem(last=False)
            total -= bytes_of(dropped)


def bytes_of(examples: Examples) -> int:
    """Return the number of bytes that samples take on a device."""
    if isinstance(examples, StoredExamples):
        array, rows = examples.stored.array, len(examples)
        inputs = array[:1].nbytes * rows
    else:
        inputs = examples.inputs.nbytes
    groups = 0 if examples.groups is None else examples.groups.nbytes
    return inputs + examples.labels.nbytes + groups


# Validation ---------------------------------------------------------------------------------------

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

    This is the initial loss of a training that starts from this model. Device, mode and NaN are as
    in `mean_loss`.
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
