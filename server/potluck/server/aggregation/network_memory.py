"""The memory of networks: their large tensors are made in files, not in private memory."""

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
"""Functions that make a tensor of nothing but its size, and may be given one to write to."""


class NetworksInFiles(TorchFunctionMode):
    """While entered, puts each large tensor that a function of torch makes into a file.

    Values are the same. Tensors made from others take private memory one at a time. Applies to the
    thread that enters it. Raises StorageError if the disk is full.
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
        """Carry out a function, and see that what it makes lies in a file."""
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
        if found.grad_fn is not None:  # asked of new tensors alone: some views refuse to say
            return found
        placed = self._like(found).copy_(found.detach()).requires_grad_(found.requires_grad)
        del found
        give_back_freed_memory()
        return placed

    def _like(self, tensor: Tensor) -> Tensor:
        """A tensor of zeros in a file, of another's size and form."""
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
    """Return True if a tensor lies in an argument's memory: a view, or the result of an in-place
    call."""
    own = found.untyped_storage().data_ptr()
    return any(
        isinstance(each, Tensor)
        and each.layout is torch.strided
        and each.untyped_storage().data_ptr() == own
        for each in arguments
    )
