"""Allocates the large tensors of networks in files instead of private memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from potluck.common.process.memory import give_back_freed_memory
from potluck.common.tensors.large_arrays import LARGE_BYTES, storage_in

_ZEROS: Final[frozenset[Callable[..., Any]]] = frozenset({torch.empty, torch.zeros})
_FACTORIES: Final[frozenset[Callable[..., Any]]] = _ZEROS | {
    torch.ones,
    torch.full,
    torch.rand,
    torch.randn,
}
"""Functions that create a tensor from its size only, and accept an output tensor."""


class NetworksInFiles(TorchFunctionMode):
    """Context manager that puts each large tensor created by a torch function into a file.

    The values stay the same. Tensors computed from other tensors are in private memory first, one
    at a time. Applies to the thread that enters it. Raises StorageError if the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function, and put its result into a file."""
        kwargs = dict(kwargs or {})
        if func in _FACTORIES and not kwargs.keys() & {"device", "generator", "out", "layout"}:
            shape = func(*args, **kwargs, device="meta")
            if shape.untyped_storage().nbytes() >= LARGE_BYTES:
                placed = self._like(shape)
                if func not in _ZEROS:
                    kwargs.pop("requires_grad", None)
                    func(*args, **kwargs, out=placed)
                return placed.requires_grad_(shape.requires_grad)
        found = func(*args, **kwargs)
        if not _is_large(found) or _shares(found, [*args, *kwargs.values()]):
            return found
        if found.grad_fn is not None:  # read only now, for a new tensor: some views raise an error
            return found
        placed = self._like(found).copy_(found.detach()).requires_grad_(found.requires_grad)
        del found
        give_back_freed_memory()
        return placed

    def _like(self, tensor: Tensor) -> Tensor:
        """Return a tensor of zeros in a file, with the shape and type of another tensor."""
        storage = storage_in(self._folder, tensor.untyped_storage().nbytes())
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_large(found: object) -> bool:
    return (
        type(found) is Tensor
        and found.layout is torch.strided
        and found.device.type == "cpu"
        and not found.is_quantized
        and found.untyped_storage().nbytes() >= LARGE_BYTES
        and found.untyped_storage().filename is None
    )


def _shares(found: Tensor, arguments: Iterable[object]) -> bool:
    """Return True if a tensor shares memory with an argument: a view, or an in-place result."""
    own = found.untyped_storage().data_ptr()
    return any(
        isinstance(each, Tensor)
        and each.layout is torch.strided
        and each.untyped_storage().data_ptr() == own
        for each in arguments
    )
