"""Weights of several lanes in one flat tensor, so that one operation updates all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LaneVectors:
    """Stacked tensors, lanes × …, with all their numbers in one flat tensor.

    flat: all numbers, tensor by tensor. tensors: views into it.
    """

    def __init__(self, like: Sequence[Tensor], lanes: int) -> None:
        """Make zeros for `lanes` lanes. like: stacked tensors of any number of lanes."""
        shapes = [(lanes, *each.shape[1:]) for each in like]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        first = like[0]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.tensors = [
            part.view(shape)
            for part, shape in zip(torch.split(self.flat, sizes), shapes, strict=True)
        ]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], lanes: int) -> LaneVectors:
        """Return a copy of the first lanes of stacked tensors."""
        made = cls(tensors, lanes)
        for mine, theirs in zip(made.tensors, tensors, strict=True):
            mine.copy_(theirs[:lanes])
        return made

    def norms(self) -> Tensor:
        """Return the Euclidean norm of each lane's vector."""
        of_tensors = [torch.linalg.vector_norm(each.flatten(1), dim=1) for each in self.tensors]
        found: Tensor = torch.linalg.vector_norm(torch.stack(of_tensors), dim=0)
        return found

    def scale(self, factors: Tensor) -> None:
        """Multiply each lane by its factor."""
        for each in self.tensors:
            each.mul_(factors.view(-1, *[1] * (each.dim() - 1)))

    def squares(self) -> Tensor:
        """Return the squared Euclidean norm of each lane's vector."""
        return torch.stack([each.square().flatten(1).sum(1) for each in self.tensors]).sum(0)
