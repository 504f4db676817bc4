"""The memory of networks: their large tensors are made in files, not in private memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from potluck.common.tensors.large_arrays import LARGE_BYTES, storage_in

_UNSET: Final = frozenset({"aten.empty", "aten.empty_strided", "aten.empty_like"})
_ZERO: Final = frozenset({"aten.zeros", "aten.zeros_like", "aten.new_zeros"})


class NetworksInFiles(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """While this is entered, each large tensor that an operation makes is put into a file.

    Values are the same. Of private memory one tensor at a time is taken, none by `torch.empty` and
    `torch.zeros`. Holds for the thread that enters it. Raises StorageError where the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder = folder

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out an operation, and move what it makes."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if not _is_large(found) or _shares(found, [*args, *kwargs.values()]):
            return found
        storage = storage_in(self._folder, found.untyped_storage().nbytes())
        placed = torch.empty(0, dtype=found.dtype).set_(
            storage, found.storage_offset(), found.size(), found.stride()
        )
        name = str(func).rpartition(".")[0]
        return placed if name in _UNSET | _ZERO else placed.copy_(found)


def _is_large(found: object) -> bool:
    return (
        type(found) is Tensor
        and found.layout is torch.strided
        and found.device.type == "cpu"
        and not found.is_quantized
        and found.untyped_storage().nbytes() >= LARGE_BYTES
    )


def _shares(found: Tensor, arguments: Iterable[object]) -> bool:
    """True where the tensor lies in the memory of an argument: a view, or written in place."""
    own = found.untyped_storage().data_ptr()
    return any(
        isinstance(each, Tensor)
        and each.layout is torch.strided
        and each.untyped_storage().data_ptr() == own
        for each in arguments
    )
