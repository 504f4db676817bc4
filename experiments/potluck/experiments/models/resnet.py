"""ResNet (He et al. 2016) with group normalisation in place of batch normalisation.

Batch statistics describe a client's own data. Averaged over clients with different data, they fit
no client (Hsieh et al. 2020, §5). Group normalisation (Wu & He 2018) has as many parameters and
keeps no statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional


def resnet10_gn(classes: int = 1000, groups: int = 32, small_images: bool = False) -> ResNet:
    """Return ResNet-10, one block per stage: 5,418,792 parameters with 1,000 classes."""
    return ResNet(_Basic, (1, 1, 1, 1), classes, groups=groups, small_images=small_images)


def resnet12_gn(classes: int = 1000, groups: int = 32, small_images: bool = False) -> ResNet:
    """Return ResNet-12, two blocks in the first stage: 5,492,776 parameters with 1,000 classes."""
    return ResNet(_Basic, (2, 1, 1, 1), classes, groups=groups, small_images=small_images)


def resnet18_gn(classes: int = 1000, groups: int = 32, small_images: bool = False) -> ResNet:
    """Return ResNet-18: 11,689,512 parameters with 1,000 classes."""
    return ResNet(_Basic, (2, 2, 2, 2), classes, groups=groups, small_images=small_images)


def resnet50_gn(classes: int = 1000, groups: int = 32, small_images: bool = False) -> ResNet:
    """Return ResNet-50: 25,557,032 parameters with 1,000 classes."""
    return ResNet(_Bottleneck, (3, 4, 6, 3), classes, groups=groups, small_images=small_images)


class ResNet(nn.Module):
    """Four stages of residual blocks on b × 3 × height × width.

    groups: number of channel groups; must divide 64. small_images: True for 32 × 32 pixels: the
    first layer is a 3 × 3 convolution without stride or pooling, instead of 7 × 7 with both.
    """

    def __init__(
        self,
        block: type[_Basic] | type[_Bottleneck],
        depths: Sequence[int],
        classes: int,
        *,
        groups: int,
        small_images: bool,
    ) -> None:
        super().__init__()
        if small_images:
            first: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False)]
        else:
            first = [nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)]
        pool = [] if small_images else [nn.MaxPool2d(3, stride=2, padding=1)]
        self.stem = nn.Sequential(*first, nn.GroupNorm(groups, 64), nn.ReLU(), *pool)
        stages: list[nn.Module] = []
        width = 64
        for stage, depth in enumerate(depths):
            for position in range(depth):
                stride = 2 if stage and not position else 1
                stages.append(block(width, 64 * 2**stage, stride, groups))
                width = 64 * 2**stage * block.expansion
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits, b × classes."""
        maps = self.stages(self.stem(inputs))
        logits: Tensor = self.classifier(maps.mean(dim=(2, 3)))
        return logits


class _Basic(nn.Module):
    """Two 3 × 3 convolutions with a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(groups, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(groups, width),
        )
        self.shortcut = _shortcut(inputs, width, stride, groups)

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.relu(self.residual(inputs) + self.shortcut(inputs))


class _Bottleneck(nn.Module):
    """A 3 × 3 convolution between two 1 × 1 convolutions, with a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.GroupNorm(groups, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(groups, width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.GroupNorm(groups, outputs),
        )
        self.shortcut = _shortcut(inputs, outputs, stride, groups)

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.relu(self.residual(inputs) + self.shortcut(inputs))


def _shortcut(inputs: int, outputs: int, stride: int, groups: int) -> nn.Module:
    """Return the identity, or a projection if the shapes differ."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.GroupNorm(groups, outputs)
    )
