"""The features that a model computes from its inputs: the inputs of its last layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from potluck.common.errors import ConfigurationError, TrainingError


def features_and_logits(
    model: nn.Module, inputs: Tensor, *, device: torch.device, batch_size: int = 1024
) -> tuple[Tensor, Tensor]:
    """Return features (n × d) and logits (n × C) of n samples, on the CPU.

    Sets the model to evaluation mode. The features are the result of the model's method
    `features(inputs)`, if it has one, else the inputs of the `nn.Linear` that is called last; they
    are flattened to n × d. A submodule named `features`, as in torchvision's models, is not used.

    Raises ConfigurationError if the model has neither, TrainingError if it fails.
    """
    model.to(device).eval()
    features_of = _features_method(model)
    pieces: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.inference_mode():
            for batch in torch.split(inputs, batch_size):
                on_device = batch.to(device)
                if features_of is None:
                    features, logits = _by_last_linear(model, on_device)
                else:
                    features, logits = features_of(on_device), model(on_device)
                pieces.append((features.flatten(1).cpu(), logits.cpu()))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        text = " ".join(str(error).split())
        raise TrainingError(
            f"the task's model failed: {text}; see that the task's model and inputs fit together"
        ) from error
    features, logits = (torch.cat(parts).clone() for parts in zip(*pieces, strict=True))
    return features, logits


def _features_method(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    method: Any = getattr(model, "features", None)
    if isinstance(method, nn.Module) or not callable(method):
        return None
    return cast(Callable[[Tensor], Tensor], method)


def _by_last_linear(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen[:] = [arguments[0]]

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [layer.register_forward_pre_hook(keep) for layer in layers]
    try:
        logits = model(batch)
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise ConfigurationError(
            f"the triplet estimate finds no features in {type(model).__name__}: it calls no "
            "nn.Linear; give the task's model a method 'features(inputs)' that returns n × d"
        )
    return seen[0], logits
