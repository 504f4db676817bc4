"""The next character in Shakespeare's plays; each speaking role is a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from potluck.common.task import Recommended
from potluck.common.tasks.stored import Prepare
from potluck.experiments.tasks.arrays import Arrays, DataFormat
from potluck.experiments.tasks.natural import NaturalTask
from potluck.experiments.tasks.networks import Networks

ALPHABET: Final = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""The characters of the text. A sample's numbers and labels are positions in it."""

WINDOW: Final = 80
"""Number of characters before the one to predict, as in LEAF."""


class CharacterGru(nn.Module):
    """A recurrent network: embeddings of 8 numbers per character, a GRU, and an output layer."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 8)
        self.recurrent = nn.GRU(8, width, batch_first=True)
        self.output = nn.Linear(width, len(ALPHABET))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs for the next character. inputs: b × characters, indices."""
        states, _ = self.recurrent(self.embedding(inputs.long()))
        result: Tensor = self.output(states[:, -1])
        return result


class CharacterTransformer(nn.Module):
    """A transformer of two layers with four heads, for inputs of `WINDOW` characters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Parameter(torch.randn(WINDOW, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(width, len(ALPHABET))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs for the next character. inputs: b × `WINDOW`, indices."""
        states = self.layers(self.embedding(inputs.long()) + self.places)
        result: Tensor = self.output(states[:, -1])
        return result


@dataclass(frozen=True, kw_only=True)
class Shakespeare(NaturalTask):
    """The next character of Shakespeare's plays after 80 characters; a client is one of 147 roles.

    Roles with at least 1,000 characters, including their names, are clients, in the order of their
    first words. The last fifth of a role's words is for evaluation. network: gru (one recurrent
    layer of 128) or transformer (two layers of width 64).
    """

    clients: PositiveInt = 147
    network: Literal["gru", "transformer"] = "gru"

    name = "shakespeare"
    form = DataFormat(
        name="shakespeare",
        shape=(WINDOW,),
        dtype=np.dtype(np.uint8),
        classes=len(ALPHABET),
        source="the plays as one text of 1,115,394 bytes, shakespeare.txt or input.txt "
        "(char-rnn's 'tinyshakespeare')",
        natural=True,
    )
    networks: ClassVar[Networks] = {"gru": CharacterGru, "transformer": CharacterTransformer}
    training: ClassVar[Recommended] = {"learning_rate": 0.5, "batch_size": 16, "epochs": 1}
    triplet: ClassVar[Recommended] = {"bias_steps": 5}
    """Few, since each of 65 characters is a class: 50 steps take ten times as long, and all
    estimates are degenerate with either number."""

    def _prepare(self, arrays: Arrays) -> Prepare:  # noqa: ARG002  for subclasses
        return _as_stored


def _as_stored(samples: Tensor, groups: Tensor | None) -> Tensor:  # noqa: ARG001  a `Prepare`
    return samples.long()
