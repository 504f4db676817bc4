"""Converts stored samples to network inputs: scaled numbers, channels first. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Images:
    """Converts uint8 images, b × height × width (× 3), to float32, b × channels × height × width.

    means, deviations: one number per channel, for values in [0, 1].
    """

    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def __call__(self, samples: Tensor, groups: Tensor | None) -> Tensor:  # noqa: ARG002 - the seam hands it over
        """Return (value / 255 − mean) / deviation."""
        images = samples[..., None] if samples.dim() == 3 else samples
        shape = (1, 1, 1, -1)
        scale = torch.tensor(self.deviations, device=images.device).view(shape) * 255.0
        shift = torch.tensor(self.means, device=images.device).view(shape) * 255.0
        return images.float().sub_(shift).div_(scale).permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True, kw_only=True)
class Colored:
    """Colours grey images (uint8, b × height × width) red or green: b × 3 × height × width.

    The parity of the sample's group gives the colour: even is red, odd is green. The blue channel
    is 0.
    """

    def __call__(self, samples: Tensor, groups: Tensor | None) -> Tensor:
        """Return the coloured images, with values in [0, 1]."""
        if groups is None:
            raise ValueError("coloured images need groups")
        inputs = torch.zeros(len(samples), 3, *samples.shape[1:], device=samples.device)
        rows = torch.arange(len(samples), device=samples.device)
        inputs[rows, groups % 2] = samples.float().div_(255.0)
        return inputs


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Standardises numbers, b × columns, float32, by each column's mean and deviation."""

    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def __call__(self, samples: Tensor, groups: Tensor | None) -> Tensor:  # noqa: ARG002 - the seam hands it over
        """Return (value − mean) / deviation."""
        shift = torch.tensor(self.means, device=samples.device)
        return (
            samples.float().sub_(shift).div_(torch.tensor(self.deviations, device=samples.device))
        )
