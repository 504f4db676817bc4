"""A model of several models in parallel, with one head on their combined features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from potluck.common.errors import ConfigurationError
from potluck.common.models.members import member_maker


class Concatenation(nn.Module):
    """Models of one kind, each cut before its last `nn.Linear`, and a head on their features.

    `use_part` chooses what is computed and trained. Part g < groups: model g only. Part `groups`:
    the head only; the encoders are frozen and in evaluation mode. Without a part: the head's logits
    if `joined` is set, otherwise the mean of the models' logits.
    """

    joined: Tensor

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        heads = [_cut(member) for member in members]
        self.encoders, self.heads = nn.ModuleList(members), nn.ModuleList(heads)
        self.head = nn.Linear(sum(head.in_features for head in heads), heads[0].out_features)
        self.register_buffer("joined", torch.zeros((), dtype=torch.int64))
        self._part: int | None = None

    def use_part(self, part: int | None) -> None:
        """Choose the part that `forward` computes and that is therefore trained."""
        if part is not None and not 0 <= part <= len(self.encoders):
            raise ConfigurationError(
                f"the model has {len(self.encoders)} groups, but the strategy trains part "
                f"{part}; set the same number of groups for the model and the strategy",
                part=part,
            )
        self._part = part

    def train(self, mode: bool = True) -> Concatenation:
        """Set the mode as in every module, but keep frozen encoders in evaluation mode."""
        super().train(mode)
        if self._part == len(self.encoders):
            self.encoders.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits, b × classes."""
        groups, part = len(self.encoders), self._part
        if part is not None and part < groups:
            logits: Tensor = self.heads[part](self.encoders[part](inputs).flatten(1))
            return logits
        with torch.no_grad():
            features = [encoder(inputs).flatten(1) for encoder in self.encoders]
        if part == groups or bool(self.joined):
            logits = self.head(torch.cat(features, dim=1))
        else:
            each = [head(given) for head, given in zip(self.heads, features, strict=True)]
            logits = torch.stack(each).mean(dim=0)
        return logits


def concatenation(*, of: Mapping[str, Any], groups: PositiveInt = 5) -> Concatenation:
    """Return a concatenation of `groups` models of the kind that `of` names.

    of: a table like [model], with the name of an installed model and its options. The model must
    end in an `nn.Linear`.
    """
    make = member_maker(of, whole="concatenation")
    return Concatenation([make() for _ in range(groups)])


def _cut(member: nn.Module) -> nn.Linear:
    """Remove the last `nn.Linear` from a model and return it."""
    linear = [name for name, each in member.named_modules() if isinstance(each, nn.Linear)]
    if not linear or not linear[-1]:
        raise ConfigurationError(
            f"model concatenation: the model {type(member).__name__} does not end in an "
            "nn.Linear; name a model that ends in one"
        )
    parent, _, own = linear[-1].rpartition(".")
    head = member.get_submodule(linear[-1])
    setattr(member.get_submodule(parent), own, nn.Identity())
    if not isinstance(head, nn.Linear):
        raise TypeError(type(head))
    return head
