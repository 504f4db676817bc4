"""Compares runs that differ in their selector: metrics, rounds to a target, and bytes sent."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from potluck.common.trainer import SHARE
from potluck.deploy.view.run_summary import MeasureSummary, RunSummary

LAST_ROUNDS = 5
_PREFERRED = ("worst_group_accuracy", "accuracy")


class ArmSummary(BaseModel):
    """One run of a comparison."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    selector: str
    last: float | None = Field(
        description=f"Mean of the metric over the last {LAST_ROUNDS} rounds that were evaluated."
    )
    reached: int | None = Field(
        description="First round whose metric reached the target; null if none did."
    )
    bytes_to_target: int | None = Field(
        description="Bytes sent to and from hosts up to that "
        "round; null if the target was not reached."
    )
    bytes_total: int = Field(description="Bytes sent to and from hosts in all rounds.")


class RunComparison(BaseModel):
    """Runs on the same data with the same seed. arms: one for each run, in their order."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")

    measure: MeasureSummary = Field(description="Metric by which the runs are compared.")
    target: float = Field(description="Value of the metric that counts as reached.")
    arms: list[ArmSummary]
    runs: list[RunSummary]


def compare(runs: Sequence[RunSummary], *, target: float) -> RunComparison | None:
    """Compare runs by the first metric that all have: worst-group accuracy, accuracy, other shares.

    target: share in [0, 1]. Return None if the runs have no metric that is a share.
    """
    shares = {each.name: each for each in runs[0].measures if each.unit == SHARE}
    name = next((name for name in (*_PREFERRED, *shares) if _measured(runs, name, shares)), None)
    if name is None:
        return None
    measure = shares[name]
    return RunComparison(
        measure=measure,
        target=target,
        arms=[_arm(run, measure, target) for run in runs],
        runs=list(runs),
    )


def _measured(runs: Sequence[RunSummary], name: str, shares: dict[str, MeasureSummary]) -> bool:
    """Return True if each run has at least one value of the metric."""
    return name in shares and all(
        any(entry.value(name) is not None for entry in run.history) for run in runs
    )


def _arm(run: RunSummary, measure: MeasureSummary, target: float) -> ArmSummary:
    values = [entry.value(measure.name) for entry in run.history]
    last = [value for value in values if value is not None][-LAST_ROUNDS:]
    sign = 1 if measure.higher_is_better else -1
    place = next(
        (
            place
            for place, value in enumerate(values)
            if value is not None and sign * value >= sign * target
        ),
        None,
    )
    moved = [entry.bytes_down + entry.bytes_up for entry in run.history]
    return ArmSummary(
        selector=run.selector,
        last=sum(last) / len(last) if last else None,
        reached=None if place is None else run.history[place].round,
        bytes_to_target=None if place is None else sum(moved[: place + 1]),
        bytes_total=sum(moved),
    )
