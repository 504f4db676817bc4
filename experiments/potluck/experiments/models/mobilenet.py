"""MobileNetV2 (Sandler et al. 2018) with group normalisation; see `resnet.py` for the reason."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

_STAGES: Final = (
    # per stage: expansion, channels, number of blocks, stride of the first block (Table 2)
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenet_v2_gn(classes: int = 1000, groups: int = 8, dropout: float = 0.2) -> MobileNetV2:
    """Return MobileNetV2: 3,504,872 parameters with 1,000 classes."""
    return MobileNetV2(classes, groups=groups, dropout=dropout)


class MobileNetV2(nn.Module):
    """Inverted residual blocks on b × 3 × height × width.

    groups: number of channel groups; must divide 8, since all widths are multiples of 8. dropout:
    probability of dropout before the classifier.
    """

    def __init__(self, classes: int, *, groups: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 32, 3, groups, stride=2)]
        width = 32
        for expansion, channels, blocks, stride in _STAGES:
            for position in range(blocks):
                step = 1 if position else stride
                layers.append(_InvertedResidual(width, channels, step, expansion, groups))
                width = channels
        layers.append(_convolution(width, 1280, 1, groups))
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits, b × classes."""
        maps = self.layers(inputs)
        logits: Tensor = self.classifier(maps.mean(dim=(2, 3)))
        return logits


class _InvertedResidual(nn.Module):
    """Expands the channels, convolves each by itself, reduces them; adds the input if shapes
    match."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, groups: int) -> None:
        super().__init__()
        width = inputs * expansion
        widened = [] if expansion == 1 else [_convolution(inputs, width, 1, groups)]
        self.residual = nn.Sequential(
            *widened,
            _convolution(width, width, 3, groups, stride=stride, depthwise=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.GroupNorm(groups, outputs),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.residual(inputs)
        return torch.add(inputs, outputs) if self.adds else outputs


def _convolution(
    inputs: int, outputs: int, size: int, groups: int, *, stride: int = 1, depthwise: bool = False
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(
            inputs,
            outputs,
            size,
            stride=stride,
            padding=size // 2,
            groups=inputs if depthwise else 1,
            bias=False,
        ),
        nn.GroupNorm(groups, outputs),
        nn.ReLU6(),
    )
