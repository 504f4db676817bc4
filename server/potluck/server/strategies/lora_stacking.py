"""Exact means of low-rank adapters of any rank, by stacking them (FLoRA, Wang et al. 2024, §3)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveFloat

from potluck.common.errors import ConfigurationError
from potluck.common.tensors.digest import digest_of
from potluck.common.tensors.large_arrays import empty
from potluck.common.tensors.layout import Layout, quoted
from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging
from potluck.server.strategy import ReadableUpdate, RoundContext, Weights

_FACTOR: Final = re.compile(r"(?P<layer>.+)\.lora_(?P<factor>[AB])\.(?P<adapter>[^.]+)\.weight")
_BLOCK_ELEMENTS: Final = 2**16


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Names of the tensors of a layer with an adapter.

    weight: W, out × in. down: A, rank × in. up: B, out × rank. The layer has W + s·B·A.
    """

    weight: str
    down: str
    up: str


@dataclass(frozen=True, kw_only=True)
class LoraStacking(Averaging):
    """Averages the products of low-rank adapters exactly, and merges them into the weights.

    W ← W + s·Σ p_k B_k A_k for each adapted layer, p_k = n_k / Σ n_j; B ← 0, A is drawn again.

    This is the mean of the full differences B_k A_k; the product of separate means of A and B is
    not. The product of the stacked factors, [p_1 B_1 … p_m B_m]·[A_1; …; A_m], is that sum for any
    ranks. A client with a lower rank than the model's leaves rows of A and columns of B zero. All
    other tensors are averaged as by FedAvg. The product is merged into W, so clients receive W and
    the adapters, and send only the adapters.

    The new A is uniform in ±1/√in, as `peft` initialises it, with a seed derived from the old A.
    Tensors have the names that `peft` gives them.

    scaling: s > 0, lora_alpha / r of the adapters.
    """

    scaling: PositiveFloat = 1.0

    individual = True
    one_way = ("*.base_layer.weight",)

    def check_model(self, layout: Layout) -> None:
        """Raise ConfigurationError unless each adapter is two matrices, and clients receive the
        adapted weight."""
        found = adapters(list(layout.by_name))
        if not found:
            raise _refused(
                "clients receive no adapters of this model; wrap it with `peft`, and list adapters "
                "and the weights below them: "
                '[model] trainable = ["*.lora_?.*", "*.base_layer.weight"]'
            )
        shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
        for each in found:
            for name in (each.weight, each.down, each.up):
                if name not in shapes:
                    raise _refused(
                        f"tensor {quoted(name)} is not sent to clients; add '*.lora_?.*' and "
                        "'*.base_layer.weight' to `trainable` of [model]"
                    )
            weight, down, up = shapes[each.weight], shapes[each.down], shapes[each.up]
            if len(down) != 2 or len(up) != 2 or down[0] != up[1] or weight != (up[0], down[1]):
                raise _refused(
                    f"tensor {quoted(each.weight)} is {weight}, and its adapters are {up} and "
                    f"{down}; only adapters of nn.Linear layers can be merged; set "
                    "target_modules to nn.Linear layers"
                )
        parts = {name for each in found for name in (each.weight, each.down, each.up)}
        for name in shapes:
            if name not in parts and ("lora_" in name or name.endswith(".base_layer.weight")):
                raise _refused(
                    f"tensor {quoted(name)} is not a factor of an adapter; use plain LoRA with one "
                    "adapter for each layer, without biases of its own or DoRA"
                )

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Merge the stacked adapters into the weights, and initialise the adapters of the next
        round."""
        following: dict[str, NDArray[Any]] = {}
        for each in adapters(list(model)):
            ups, downs = _stacked(each, context.updates, self.scaling * context.weights)
            following[each.weight] = _merged(model[each.weight], ups, downs)
            following[each.down] = _drawn_after(model[each.down])
            following[each.up] = np.zeros_like(model[each.up])
        merged = {**combined, **following}
        return {name: merged[name] for name in model}, state


def adapters(names: Sequence[str]) -> list[Adapter]:
    """Return the adapters among a model's tensors, in the tensors' order. One factor of an adapter
    may be missing."""
    pairs: dict[tuple[str, str], Adapter] = {}
    for name in names:
        match = _FACTOR.fullmatch(name)
        if match is not None:
            layer, adapter = match["layer"], match["adapter"]
            pairs[layer, adapter] = Adapter(
                weight=f"{layer}.base_layer.weight",
                down=f"{layer}.lora_A.{adapter}.weight",
                up=f"{layer}.lora_B.{adapter}.weight",
            )
    layers = [layer for layer, _ in pairs]
    for layer in layers:
        if layers.count(layer) > 1:
            raise _refused(f"layer {quoted(layer)} has several adapters; keep only one")
    return list(pairs.values())


def _refused(why: str) -> ConfigurationError:
    return ConfigurationError(f"strategy lora-stacking: {why}", strategy="lora-stacking")


def _stacked(
    adapter: Adapter, updates: Sequence[ReadableUpdate], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the stacked factors of all clients: weighted B, out × Σ ranks; A, Σ ranks × in."""
    ups, downs = [], []
    for update, weight in zip(updates, weights, strict=True):
        up = update.tensor(adapter.up).astype(np.float64)
        down = update.tensor(adapter.down).astype(np.float64)
        used = up.any(axis=0) & down.any(axis=1)  # ranks with a zero factor contribute nothing
        ups.append(weight * up[:, used])
        downs.append(down[used])
    return np.concatenate(ups, axis=1), np.concatenate(downs)


def _merged(
    weight: NDArray[Any], ups: NDArray[np.float64], downs: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Return W + ups·downs, computed in float64 and rounded once; the order of sums is fixed."""
    merged: NDArray[np.float32] = empty(weight.shape, np.float32)
    rows = max(1, _BLOCK_ELEMENTS // max(1, weight.shape[1]))
    for place in _blocks(len(weight), rows):
        total = weight[place].astype(np.float64)
        product = np.empty_like(total)
        for column, row in zip(ups[place].T, downs, strict=True):
            np.multiply(column[:, None], row, out=product)
            np.add(total, product, out=total)
        merged[place] = total
    return merged


def _blocks(size: int, block: int) -> Iterator[slice]:
    for begin in range(0, size, block):
        yield slice(begin, min(begin + block, size))


def _drawn_after(down: NDArray[Any]) -> NDArray[np.float32]:
    """Draw the next A, uniform in ±1/√in, seeded by the digest of the current A."""
    digest = digest_of(np.ascontiguousarray(down).reshape(-1).view(np.uint8).data)
    generator = np.random.Generator(np.random.PCG64(int(digest, 16)))
    bound = 1 / np.sqrt(down.shape[1])
    return generator.uniform(-bound, bound, down.shape).astype(np.float32)
