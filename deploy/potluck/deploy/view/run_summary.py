"""The summary of a run: the last output of `potluck demo --json`, and content of `summary.json`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from potluck.common.errors import RunError
from potluck.common.learning.measures import TRAINING, MeasuredModel
from potluck.common.learning.spread import Coverage
from potluck.common.records.round import Round
from potluck.deploy.operator.json_view import other_measures, spread_values
from potluck.deploy.operator.run_view import RunView, shown_measures


class MeasureSummary(BaseModel):
    """A metric that is shown to people."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    label: str
    unit: str = Field(description='Unit of the metric\'s mean; "share" for a metric in [0, 1].')
    higher_is_better: bool


class CoverageSummary(BaseModel):
    """Number of clients and samples behind a metric's value."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")

    clients: int = Field(
        description="Number of clients that sent the metric; 0 if the coordinator measured it."
    )
    asked: int = Field(
        default=0, description="Number of clients with samples that were asked for the metric."
    )
    samples: int = Field(
        default=0, description="Number of samples behind the metric; 0 if masked updates hide it."
    )
    partial: bool = Field(
        default=False, description="True if fewer clients than the run requires sent the metric."
    )

    @classmethod
    def of(cls, coverage: Coverage) -> CoverageSummary:
        """Return the summary of a coverage."""
        return cls(**vars(coverage))

    @property
    def coverage(self) -> Coverage:
        """The coverage as a plain record."""
        return Coverage(**self.model_dump())


class SpreadSummary(CoverageSummary):
    """A metric's distribution over clients; each client has the same weight."""

    mean: float
    worst_tenth: float = Field(description="Mean over the worst tenth of clients.")
    quantiles: dict[str, float] = Field(
        description='Quantiles of the metric; keys are shares of clients, such as "0.1".'
    )


class LateSummary(BaseModel):
    """An update that missed its round and joined a later one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    client: str
    round: int = Field(description="Round in which the client was selected.")
    weight: float = Field(
        description="Weight of the late update, as a factor; an update in time has 1."
    )


class RoundSummary(BaseModel):
    """A committed round. Shares are in [0, 1]; a metric that is not defined is None."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")

    round: int = Field(description="Number of the round, from 1.")
    cohort: list[str] = Field(description="Client ids in selection order.")
    accuracy: float | None
    worst_group_accuracy: float | None
    loss: float | None
    others: dict[str, float] = Field(default={}, description="Other metrics, by name.")
    spreads: dict[str, SpreadSummary] = Field(
        default={},
        description="Distributions of metrics over clients, by name, if the run shows them.",
    )
    coverage: dict[str, CoverageSummary] = Field(
        default={},
        description="For each metric: number of clients that sent it, and of their samples.",
    )
    late: list[LateSummary] = Field(
        default=[], description="Updates of earlier rounds that are part of the model."
    )
    seconds: float = Field(description="Seconds from selection to commit.")
    bytes_down: int = Field(
        description="Model bytes that hosts have received. If the coordinator restarted during "
        "the round: only since the restart."
    )
    bytes_up: int = Field(description="Update bytes received from hosts.")

    def value(self, measure: str) -> float | None:
        """Return a metric of the round; None if it was not measured."""
        known = {
            "accuracy": self.accuracy,
            "worst_group_accuracy": self.worst_group_accuracy,
            "loss": self.loss,
        }
        return known[measure] if measure in known else self.others.get(measure)


class RunSummary(BaseModel):
    """A run. The metrics are those of its last evaluated model; sums are over its rounds."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")

    run: str = Field(description="Id of the run.")
    task: str
    selector: str
    strategy: str
    rounds: int = Field(description="Number of committed rounds.")
    clients: int = Field(description="Number of clients of the federation.")
    count: int = Field(description="Number of clients selected in each round.")
    accuracy: float | None
    worst_group_accuracy: float | None
    loss: float | None
    seconds: float
    bytes_down: int
    bytes_up: int
    coverage: dict[str, CoverageSummary] = Field(
        default={},
        description="For each metric of the last evaluated model: number of clients "
        "that sent it, and of their samples.",
    )
    measures: list[MeasureSummary] = Field(
        default=[], description="Metrics that rounds may have, the most important first."
    )
    history: list[RoundSummary]


def summarise(view: RunView, *, clients: int) -> RunSummary:
    """Return the summary of a watched run in a federation of `clients` clients.

    Raises RunError if no event of the run was received.
    """
    if view.status is None:
        raise RunError("the coordinator sent no event of the run; check that the coordinator runs")
    history = [_round_summary(committed) for committed in view.rounds]
    evaluated = [entry for entry in history if _has_evaluation(entry)]
    last = evaluated[-1] if evaluated else None
    return RunSummary(
        run=view.status.run_id,
        task=view.status.task,
        selector=view.status.selector,
        strategy=view.status.strategy,
        rounds=len(history),
        clients=clients,
        count=view.status.count,
        accuracy=last.accuracy if last else None,
        worst_group_accuracy=last.worst_group_accuracy if last else None,
        loss=last.loss if last else None,
        coverage=last.coverage if last else {},
        seconds=sum(entry.seconds for entry in history),
        bytes_down=sum(entry.bytes_down for entry in history),
        bytes_up=sum(entry.bytes_up for entry in history),
        measures=[
            MeasureSummary(
                name=name,
                label=each.label,
                unit=each.unit,
                higher_is_better=each.higher_is_better,
            )
            for name, each in shown_measures(view.status).items()
            if not _seldom(name) or any(name in entry.others for entry in history)
        ],
        history=history,
    )


def _has_evaluation(entry: RoundSummary) -> bool:
    """Return True if the round's model was evaluated, with any metrics."""
    measured = entry.accuracy is not None or entry.loss is not None
    return measured or any(not name.startswith(TRAINING) for name in entry.others)


def _seldom(measure: str) -> bool:
    """Return True for a metric that only some runs have: one of trainings or of clients' models."""
    return measure.startswith((TRAINING, MeasuredModel.TUNED, MeasuredModel.PERSONAL))


def _round_summary(record: Round) -> RoundSummary:
    own = ("accuracy", "worst_group_accuracy", "loss")
    return RoundSummary(
        round=record.number,
        cohort=list(record.cohort),
        **{name: record.measures.get(name) for name in own},
        others=other_measures(record),
        spreads={
            name: SpreadSummary(**spread_values(each)) for name, each in record.spreads.items()
        },
        coverage={name: CoverageSummary.of(each) for name, each in record.coverage.items()},
        late=[LateSummary(**vars(each)) for each in record.late],
        seconds=record.seconds,
        bytes_down=record.bytes_down,
        bytes_up=record.bytes_up,
    )
