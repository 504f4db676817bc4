"""A model with low-rank adapters, by `peft`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import PositiveFloat, PositiveInt
from torch import nn

from potluck.common.errors import ConfigurationError
from potluck.common.models.members import member_maker
from potluck.integrations.adapters.lora import with_lora


def low_rank(
    *, of: Mapping[str, Any], rank: PositiveInt = 16, scaling: PositiveFloat = 2.0
) -> nn.Module:
    """Return a model with a low-rank adapter on each `nn.Linear`; its other layers are unchanged.

    of: a table like [model]: the name of an installed model and its options. rank: rank of the
    adapters. scaling: factor s in W + s·B·A; equals lora_alpha / rank. Needs potluck[lora].
    """
    model = member_maker(of, whole="low-rank")()
    targets = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    if not targets:
        raise ConfigurationError(
            f"model low-rank: a {type(model).__name__} has no nn.Linear to adapt; name a model "
            "with at least one nn.Linear"
        )
    adapted: nn.Module = with_lora(model, rank=rank, targets=targets, scaling=scaling)
    return adapted
