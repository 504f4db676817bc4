"""A selector and a strategy with points where a test may stop or kill the coordinator."""

from __future__ import annotations

from potluck_crash_points import reach

from potluck.server.selection import RoundOutcome, Selection, SelectionContext
from potluck.server.selectors.uniform import Uniform
from potluck.server.state import State
from potluck.server.strategies.fedavg import FedAvg
from potluck.server.strategies.feddf import FedDF
from potluck.server.strategies.rhfl_logits import RHFLLogits
from potluck.server.strategy import (
    Combine,
    RoundContext,
    ServerTraining,
    UpdateStatistics,
    Weights,
)


class Selector(Uniform):
    """Uniform. Points: `select`, before the cohort is known, and `observe`, before the commit."""

    def select(self, state: State, context: SelectionContext) -> Selection:
        """As Uniform does."""
        reach("select")
        return super().select(state, context)

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """As Uniform does."""
        reach("observe")
        return super().observe(state, outcome)


class Strategy(FedAvg):
    """FedAvg. Points: `init`, when a run begins or is resumed before its first commit; `weigh`,
    before the reduction; `apply`, after it."""

    def init(self, model: Weights) -> State:
        """As FedAvg does."""
        reach("init")
        return super().init(model)

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """As FedAvg does."""
        reach("weigh")
        return super().weigh(statistics)

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """As FedAvg does."""
        reach("apply")
        return super().apply(state, model, combined, context)


class Distilling(FedDF):
    """FedDF. Point: `distil`, in the process that trains on the coordinator."""

    def train(self, training: ServerTraining) -> None:
        """Train as FedDF does, but from half the mean: from the mean of linear models, nothing
        would remain to learn."""
        training.progress(0.25)
        reach("distil")
        training.load({name: array / 2 for name, array in training.weights().items()})
        super().train(training)


class Aligning(RHFLLogits):
    """RHFL with a model for each client. Point: `align`, in the process that trains on the
    coordinator."""

    def train(self, training: ServerTraining) -> None:
        """As RHFL does."""
        reach("align")
        super().train(training)
