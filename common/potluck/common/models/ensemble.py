"""A model that contains one model per client and combines their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from potluck.common.errors import ConfigurationError
from potluck.common.models.members import member_maker


class Ensemble(nn.Module):
    """An ensemble of classifiers, which may be of different kinds.

    `use_part` chooses what is computed and trained. Part k < members: classifier k only. Without a
    part: log Σ_k c_k·softmax of classifier k, where c_k is its share of `confidence`. The softmax
    of this output is the weighted mean of all predictions. Weights are equal while no confidence is
    above 0. rounds: for each classifier, the round in which it was last trained.
    """

    confidence: Tensor
    rounds: Tensor

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.register_buffer("confidence", torch.zeros(len(members)))
        self.register_buffer("rounds", torch.zeros(len(members), dtype=torch.int64))
        self._part: int | None = None

    def use_part(self, part: int | None) -> None:
        """Choose the part that `forward` computes and that is therefore trained."""
        if part is not None and not 0 <= part < len(self.members):
            raise ConfigurationError(
                f"the ensemble has {len(self.members)} models, but the strategy trains model "
                f"{part}; set the strategy's number of clients to the number of models",
                part=part,
            )
        self._part = part

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's output, b × classes."""
        if self._part is not None:
            logits: Tensor = self.members[self._part](inputs)
            return logits
        beliefs = [torch.log_softmax(member(inputs), dim=1) for member in self.members]
        known = self.confidence.sum() > 0
        counts = torch.where(known, self.confidence, torch.ones_like(self.confidence))
        shares = (counts / counts.sum()).log()
        return torch.logsumexp(torch.stack(beliefs) + shares[:, None, None], dim=0)


def ensemble(
    *,
    of: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    members: Annotated[int, Field(ge=2, le=64)] = 10,
) -> Ensemble:
    """Return an ensemble of `members` classifiers.

    of: a table like [model], with the name of an installed model and its options; or a list of such
    tables, which are assigned to the members in turn.
    """
    tables = [of] if isinstance(of, Mapping) else list(of)
    if not tables:
        raise ConfigurationError(
            "model ensemble: option 'of' is an empty list; name at least one model"
        )
    makers = [member_maker(table, whole="ensemble") for table in tables]
    return Ensemble([makers[place % len(makers)]() for place in range(members)])
