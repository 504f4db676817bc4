"""Turns stored samples into inputs: scaled numbers, channels first. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Images:
    """uint8 images, b × height × width (× 3), into b × channels × height × width, float32.

    means, deviations: of the channels, of values in [0, 1].
    """

    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def __call__(self, samples: Tensor, groups: Tensor | None) -> Tensor:  # noqa: ARG002 - the seam hands it over
        """(value / 255 − mean) / deviation."""
        images = samples[..., None] if samples.dim() == 3 else samples
        shape = (1, 1, 1, -1)
        scale = torch.tensor(self.deviations, device=images.device).view(shape) * 255.0
        shift = torch.tensor(self.means, device=images.device).view(shape) * 255.0
        return images.float().sub_(shift).div_(scale).permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True, kw_only=True)
class Colored:
    """Grey images (uint8, b × height × width) into red or green ones, b × 3 × height × width.

    The colour is the parity of the sample's group: 0 red, 1 green; blue stays empty.
    """

    def __call__(self, samples: Tensor, groups: Tensor | None) -> Tensor:
        """Values in [0, 1]."""
        if groups is None:
            raise ValueError("coloured images need groups")
        inputs = torch.zeros(len(samples), 3, *samples.shape[1:], device=samples.device)
        rows = torch.arange(len(samples), device=samples.device)
        inputs[rows, groups % 2] = samples.float().div_(255.0)
        return inputs


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Numbers, b × columns, float32; each column less its mean, over its deviation."""

    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def __call__(self, samples: Tensor, groups: Tensor | None) -> Tensor:  # noqa: ARG002 - the seam hands it over
        """(value − mean) / deviation."""
        shift = torch.tensor(self.means, device=samples.device)
        return (
            samples.float().sub_(shift).div_(torch.tensor(self.deviations, device=samples.device))
        )
