"""Adds low-rank adapters by `peft` to a model's layers; some clients may train a lower rank.

With `[model] trainable = ["*.lora_?.*"]` only these adapters are sent. The strategy `lora-stacking`
also needs the adapted weights: add `"*.base_layer.weight"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from potluck.common.settings.extras import extra_named

with extra_named():
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer


def with_lora(
    model: Any,
    *,
    rank: int,
    targets: str | Sequence[str],
    scaling: float = 1.0,
    **options: Any,
) -> Any:
    """Add low-rank adapters to a model of torch or transformers, and freeze its other parameters.

    rank: rank of the adapters, ≥ 1: the largest rank that a client trains. targets: endings of the
    names of the layers to adapt, or "all-linear" in a model of transformers. scaling: factor s > 0
    in W + s·B·A, the same for clients of every rank. options: further options of `peft.LoraConfig`.
    """
    wanted = targets if isinstance(targets, str) else list(targets)
    alpha: Any = scaling * rank  # peft declares an integer, but takes any number
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=wanted, **options)
    )


def keep_rank(model: Any, rank: int) -> None:
    """Reduce all adapters of a model to this rank: zero the other rows of A and columns of B.

    The zeros get no gradient and stay zero. Call it in `train`, before the first step. Raises
    ValueError if an adapter has a lower rank.
    """
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                adapters: Any = layer.lora_A
                for name, down in adapters.items():
                    up: Any = layer.lora_B[name]
                    if not 1 <= rank <= len(down.weight):
                        raise ValueError(
                            f"an adapter of rank {len(down.weight)} can't be trained with the "
                            f"larger rank {rank}; create the model with the largest rank of all "
                            "clients"
                        )
                    down.weight[rank:] = 0
                    up.weight[:, rank:] = 0
