"""Divides a model into tensors that are sent and tensors that are not.

A run file's `[model] trainable = [patterns]` sets which tensors are sent in both directions. The
other tensors are the base, which is not trained. Every machine has the base already, from a file or
from the task's model. A digest shows that all machines have the same base. `keep = [patterns]` sets
which tensors each client trains for itself: these never leave the client, and their initial values
are those of the task's model. Hosts and the coordinator use this module.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError, LayoutError, StorageError
from potluck.common.settings.model_table import ModelTable
from potluck.common.tensors.digest import hasher
from potluck.common.tensors.layout import Layout, TensorSpec, quoted
from potluck.common.tensors.model_arrays import load_arrays, state_arrays
from potluck.common.tensors.shards import opened_weights
from potluck.common.tensors.stored_tensors import copied

if TYPE_CHECKING:
    from torch import Tensor

_PIECE_BYTES = 1 << 20
_PEFT_PREFIX = "base_model.model."
_PEFT_LAYER = ".base_layer."


@dataclass(frozen=True, kw_only=True)
class DividedModel:
    """A model of which only some tensors are sent.

    network: the whole model, a `torch.nn.Module` or arrays by name. layout: layout of the tensors
    that are sent. base_blake3: digest of the tensors that are not trained; empty if all are
    trained. buffers: copies of the base's buffers, which a network overwrites while it trains.
    kept: copies of the initial values of the tensors that a client keeps.
    """

    network: Any
    layout: Layout
    base_blake3: str = ""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)

    @property
    def _travelling(self) -> Container[str] | None:
        """Names of the tensors that are sent; None if all tensors are sent."""
        if isinstance(self.network, Mapping):  # a trainer may have added arrays
            return self.network.keys() - self.kept.keys()
        return self.layout.by_name if self.base_blake3 or self.kept else None

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the tensors that are sent, as `state_arrays` returns them."""
        return state_arrays(self.network, only=self._travelling)

    def kept_arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the tensors that a client keeps, as `state_arrays` returns them.

        Raises LayoutError if a training has changed their names, shapes or types.
        """
        arrays = state_arrays(self.network, only=self.kept)
        Layout.of(arrays).check_matches(Layout.of(self.kept), what="trained model", whose="task")
        return arrays

    def load(
        self,
        arrays: Mapping[str, NDArray[np.generic]],
        kept: Mapping[str, NDArray[np.generic]] | None = None,
    ) -> None:
        """Overwrite the tensors that are sent and the tensors that a client keeps. Restore the
        base's buffers.

        kept: values of the kept tensors, by default the initial ones. Raises LayoutError if
        `arrays` or `kept` has missing or additional tensors.
        """
        load_arrays(self.network, arrays, only=self._travelling)
        if self.kept:
            load_arrays(self.network, self.kept if kept is None else kept, only=self.kept)
        if not self.buffers:
            return
        import torch

        state = self.network.state_dict()
        with torch.no_grad():
            for name, values in self.buffers.items():
                state[name].copy_(values)

    def check_base(self) -> None:
        """Raise LayoutError if the base's parameters have changed."""
        if self.base_blake3:
            state = {**self.network.state_dict(), **self.buffers}
            others = self.layout.by_name.keys() | self.kept.keys()
            base = {name: state[name] for name in state if name not in others}
            if _digest(base) != self.base_blake3:
                raise LayoutError(
                    "training has changed tensors of the base model; add these tensors to "
                    "`trainable` of [model], or don't train them"
                )


def divided(network: Any, table: ModelTable | None, data: Path | None) -> DividedModel:
    """Divide a network as a run's `[model]` table specifies, and load the base that the table
    names.

    data: folder that contains the base's file. The base's parameters are frozen. The initial values
    of the tensors that clients keep are the network's current ones. Raises ConfigurationError if
    patterns, base or digest don't match the network, LayoutError for a tensor that can't be sent.
    """
    if table is None or not table.divides:
        return DividedModel(network=network, layout=Layout.of(state_arrays(network)))
    arrays = isinstance(network, Mapping)
    if arrays and table.trainable:
        raise ConfigurationError(
            "[model]: `trainable` needs a torch module, but this task's model is a dict of "
            "arrays; remove `trainable`"
        )
    state = network if arrays else network.state_dict()
    travelling, kept = _parts(table, list(state))
    if not arrays:
        _check_ties(state, travelling, kept)
    first = {name: np.array(array) for name, array in state_arrays(network, only=kept).items()}
    layout = Layout.of(state_arrays(network, only=travelling))
    if not table.trainable:
        return DividedModel(network=network, layout=layout, kept=first)
    others = travelling | kept
    base = {name: tensor for name, tensor in state.items() if name not in others}
    if table.base is not None:
        _load_base(state, travelling, table.base, data)
    blake3 = _digest(base)
    if table.base_blake3 not in ("", blake3):
        found = (
            f"from the file {table.base!r}" if table.base is not None else "from the task's model"
        )
        raise ConfigurationError(
            f"the base model of this machine ({found}) has the digest {blake3[:12]}…, but the "
            f"run's base has {table.base_blake3[:12]}…; set `base` of [model] to a file that is "
            "the same on all machines",
            base_blake3=blake3,
        )
    module: Any = network  # a module: arrays have returned above
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in base:
            parameter.requires_grad_(False)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return DividedModel(
        network=network,
        layout=layout,
        base_blake3=blake3,
        buffers={name: base[name].clone() for name in base if name not in parameters},
        kept=first,
    )


def _parts(table: ModelTable, names: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the tensors that are sent, and of those that clients keep."""
    kept = _matching(table.keep, names, "keep")
    if not table.trainable:
        travelling = frozenset(names) - kept
    else:
        travelling = _matching(table.trainable, names, "trainable")
    both = sorted(travelling & kept)
    if both:
        raise ConfigurationError(
            f"[model]: tensor {quoted(both[0])} matches both `trainable` (is sent) and `keep` "
            "(never leaves a client); let it match only one",
            tensor=quoted(both[0]),
        )
    if not travelling:
        raise ConfigurationError(
            "[model]: `keep` matches all tensors, so that clients would send nothing; let `keep` "
            "match fewer tensors"
        )
    return travelling, kept


def _matching(patterns: Sequence[str], names: Sequence[str], key: str) -> frozenset[str]:
    found: set[str] = set()
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigurationError(
                f"[model]: no tensor's name matches '{pattern}' of `{key}`; the model's tensors "
                f"are {', '.join(names[:3])}{(', …' if len(names) > 3 else '')}",
                pattern=pattern,
            )
        found.update(matching)
    return frozenset(found)


def _check_ties(
    state: Mapping[str, Tensor], travelling: frozenset[str], kept: frozenset[str]
) -> None:
    """Raise ConfigurationError unless tensors that share memory belong to the same part."""
    owners: dict[int, str] = {}
    for name, tensor in state.items():
        if not tensor.numel():
            continue
        first = owners.setdefault(tensor.untyped_storage().data_ptr(), name)
        key = "trainable" if (first in kept) == (name in kept) else "keep"
        if (first in travelling, first in kept) != (name in travelling, name in kept):
            raise ConfigurationError(
                f"[model]: tensors {quoted(first)} and {quoted(name)} share their memory, but "
                f"only one matches `{key}`; change the patterns so that both match, or none",
                tensor=quoted(name),
            )


def _load_base(
    state: Mapping[str, Tensor], travelling: frozenset[str], name: str, data: Path | None
) -> None:
    """Overwrite a network's tensors with the tensors of a file in the data directory.

    The file must have all tensors of the base. If it also has tensors that are sent, it gives their
    initial values.
    """
    path = None if data is None else (data / name).resolve()
    if data is None or path is None or not path.is_relative_to(data.resolve()):
        raise ConfigurationError(
            f"[model]: base is '{name}'; it must be a .safetensors file, or a folder of them, in "
            "the data_directory of the configuration file",
            base=name,
        )
    import torch

    try:
        with opened_weights(path) as weights, torch.no_grad():
            found = _in_file(state, weights.layout)
            for tensor_name, tensor in state.items():
                specification = found.get(tensor_name)
                if specification is not None and specification.shape == tuple(tensor.shape):
                    tensor.copy_(_tensor(copied(weights.arrays, specification.name), specification))
                elif tensor_name not in travelling:
                    shape = None if specification is None else specification.shape
                    what = "is missing" if shape is None else f"has shape {shape}"
                    raise ConfigurationError(
                        f"[model]: {path} does not fit the model: tensor {quoted(tensor_name)} "
                        f"{what}; the model's tensor has shape {tuple(tensor.shape)}",
                        tensor=quoted(tensor_name),
                    )
    except (LayoutError, StorageError) as error:
        raise ConfigurationError(f"[model]: base: {error.message}", path=path) from None


def _in_file(state: Mapping[str, Tensor], file: Layout) -> dict[str, TensorSpec]:
    """Return a file's tensors under the names that they have in the network.

    Names in files of pretrained models lack the parts that `peft` adds to a model's layers. If
    several tensors share memory, such files have only one of them.
    """
    found: dict[str, TensorSpec] = {}
    shared: dict[int, TensorSpec] = {}
    for name, tensor in state.items():
        plain = name.removeprefix(_PEFT_PREFIX).replace(_PEFT_LAYER, ".")
        specification = file.by_name.get(name) or file.by_name.get(plain)
        if specification is not None:
            found[name] = specification
            shared[tensor.data_ptr()] = specification
    for name, tensor in state.items():
        if name not in found and tensor.numel() and tensor.data_ptr() in shared:
            found[name] = shared[tensor.data_ptr()]
    return found


def _tensor(array: NDArray[np.generic], specification: TensorSpec) -> Tensor:
    """Return a torch tensor that shares the array's memory."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if specification.dtype == "BF16" else tensor


def _digest(base: Mapping[str, Tensor]) -> str:
    """Return the BLAKE3 digest of names, types, shapes and values, in the order of the names."""
    import torch

    digest = hasher()
    for name in sorted(base):
        tensor = base[name].detach()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        flat = tensor.cpu().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        for begin in range(0, content.size, _PIECE_BYTES):
            digest.update(content[begin : begin + _PIECE_BYTES].data)
    return digest.hexdigest()
