"""Clients' samples on a GPU: copied to the GPU once, not in every round."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch

from potluck.common.task import Examples
from potluck.common.tasks.stored import StoredExamples

SHARE_OF_MEMORY = 0.25
"""Share of a GPU's memory for samples; the rest is for models and their activations."""


class DeviceSamples:
    """Cache of samples on a device; it drops the least recently used when full."""

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
