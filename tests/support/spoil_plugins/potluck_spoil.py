"""A strategy that replaces the model by zeros while the file named by POTLUCK_SPOIL exists."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from potluck.server.state import State
from potluck.server.strategies.fedavg import FedAvg
from potluck.server.strategy import RoundContext, Weights


class Strategy(FedAvg):
    """FedAvg, or a model of zeros."""

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return FedAvg's model, or zeros."""
        weights, state = super().apply(state, model, combined, context)
        if Path(os.environ["POTLUCK_SPOIL"]).exists():
            weights = {name: np.zeros_like(array) for name, array in weights.items()}
        return weights, state
