"""The rule that decides a run's best model and its early end. Pure: no clock, no disk.

The state of a rule is a `BestSoFar`, which is stored with each round. After a kill, the resumed run
loads this state and ends in the same round as without the kill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from potluck.server.store.records import BestSoFar


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """The rule of one run.

    measure: name of the metric. patience, minimum_delta, target: as in `Stopping`; patience and
    target are both None if the rule only tracks the best model. opening: number of rounds at the
    start that don't count.
    """

    measure: str
    higher_is_better: bool
    patience: int | None = None
    minimum_delta: float = 0.0
    target: float | None = None
    opening: int = 0

    def after(
        self, so_far: BestSoFar | None, round_number: int, value: float | None
    ) -> BestSoFar | None:
        """Return the record after one more evaluation; None until an evaluation counts.

        value: value of the metric; None or NaN if the evaluation did not include the metric.
        """
        if round_number <= self.opening:
            return so_far
        before = so_far or BestSoFar(measure=self.measure)
        if value is None or math.isnan(value):
            return replace(before, stalled=before.stalled + 1)
        after = before
        if before.value is None or self._is_better(value, before.value):
            after = replace(after, round=round_number, value=value)
        if before.mark is None or self._is_better(value, before.mark, by=self.minimum_delta):
            return replace(after, mark=value, stalled=0)
        return replace(after, stalled=before.stalled + 1)

    def why_over(self, so_far: BestSoFar | None) -> str:
        """Return the reason why the run ends early; empty if it continues."""
        if so_far is None:
            return ""
        best = "" if so_far.value is None else f"{so_far.value:.6g} in round {so_far.round}"
        target, patience = self.target, self.patience
        if (
            target is not None
            and so_far.value is not None
            and (so_far.value == target or self._is_better(so_far.value, target))
        ):
            return f"stopped early: {self.measure} is {best}, and stop.target {target:g}"
        if patience is None or so_far.stalled < patience:
            return ""
        evaluations = f"{patience} evaluation{'s' * (patience > 1)}"
        if not best:
            return f"stopped early: {self.measure} was not measured in {evaluations}"
        by = f" by more than {self.minimum_delta:g}" if self.minimum_delta else ""
        return (
            f"stopped early: {self.measure} has not improved{by} in {evaluations}; its best is "
            f"{best}"
        )

    def _is_better(self, value: float, than: float, *, by: float = 0.0) -> bool:
        """Return True if a value is better than another by more than `by`."""
        return value > than + by if self.higher_is_better else value < than - by
