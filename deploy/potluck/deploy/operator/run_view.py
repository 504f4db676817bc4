"""A watcher's view of a run: the events of `WatchRun`, combined into one value.

Events repeat after a reconnect, so combining them is idempotent. A run may have tens of thousands
of rounds. The views of one run share these rounds, and a later view never has fewer rounds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from potluck.common.learning.measures import (
    CLASSIFICATION,
    TRAINING,
    MeasuredModel,
    of_model,
)
from potluck.common.learning.spread import Coverage
from potluck.common.records.round import INCLUDED, LEFT_OUT, TROUBLED, Round
from potluck.common.records.round_message import coverage_of, member_state_name, round_of
from potluck.common.trainer import Measure
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import RunState

ENDED = frozenset(
    {RunState.RUN_STATE_FINISHED, RunState.RUN_STATE_STOPPED, RunState.RUN_STATE_FAILED}
)
_SHORT = timedelta(minutes=2)
_AWAY_NAMED = 5
_SHOWN = ("loss", "accuracy", "worst_group_accuracy")
"""Metrics of classification that are shown to people, in this order."""
_FIRST = "accuracy"
_TRAINED = frozenset({"uploading", INCLUDED})


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The state of a run after the events received so far.

    status: None before the first event. committed: rounds by number. progress: the current round;
    None between rounds. notices: in the order received.
    """

    status: operator_pb2.RunStatus | None = None
    committed: dict[int, Round] = field(default_factory=dict)
    progress: operator_pb2.RoundProgress | None = None
    notices: tuple[operator_pb2.Notice, ...] = ()

    @property
    def ended(self) -> bool:
        """True once the run has ended."""
        return self.status is not None and self.status.state in ENDED

    @property
    def rounds(self) -> list[Round]:
        """The committed rounds in order."""
        return [self.committed[number] for number in sorted(self.committed)]


def observe(view: RunView, event: operator_pb2.WatchRunResponse) -> RunView:
    """Return the view after one more event."""
    match event.WhichOneof("event"):
        case "status":
            seen = replace(view, status=event.status)
            return replace(seen, progress=None) if seen.ended else seen
        case "committed":
            view.committed[event.committed.round] = round_of(event.committed)
            over = _is_over(view.progress, event.committed)
            return replace(view, progress=None) if over else view
        case "progress":
            return replace(view, progress=event.progress)
        case "notice" if event.notice not in view.notices:
            return replace(view, notices=(*view.notices, event.notice))
        case _:  # a known notice, or an event kind of a newer coordinator
            return view


def is_news(view: RunView, event: operator_pb2.WatchRunResponse) -> bool:
    """Return True if an event would change `view`."""
    match event.WhichOneof("event"):
        case "status":
            return event.status != view.status or (view.ended and view.progress is not None)
        case "committed":
            known = view.committed.get(event.committed.round)
            return known != round_of(event.committed) or _is_over(view.progress, event.committed)
        case "progress":
            return event.progress != view.progress
        case "notice":
            return event.notice not in view.notices
        case _:
            return False


def _is_over(
    progress: operator_pb2.RoundProgress | None, committed: operator_pb2.CommittedRound
) -> bool:
    return progress is not None and progress.round <= committed.round


def lacks_clients(status: operator_pb2.RunStatus) -> bool:
    """Return True if a run waits for more clients or hosts than are connected."""
    waiting = status.waiting
    return waiting.clients < waiting.clients_needed or waiting.hosts < waiting.hosts_needed


def waiting_text(waiting: operator_pb2.Waiting, now: datetime) -> str:
    """Return a text on why a run waits, and until when (by this machine's clock)."""
    text = waiting.what
    if waiting.HasField("until"):
        until = waiting.until.ToDatetime(tzinfo=UTC)
        exact = until - now < _SHORT
        text += f" until {until.astimezone():{'%H:%M:%S' if exact else '%H:%M'}}"
    away = list(waiting.away[:_AWAY_NAMED])
    if away:
        more = waiting.away_count - len(away)
        text += f"; disconnected: {', '.join(away)}{f' and {more} more' if more else ''}"
    return text


def run_state_name(state: RunState.ValueType) -> str:
    """Return a run's state as one lower-case word."""
    return RunState.Name(state).removeprefix("RUN_STATE_").lower()


def best_coverage(best: operator_pb2.BestModel) -> Coverage | None:
    """Return the clients and samples behind a best model's value; None if they are unknown."""
    return coverage_of(best.coverage) if best.HasField("coverage") else None


def shown_measures(status: operator_pb2.RunStatus | None) -> dict[str, Measure]:
    """Return the metrics of a run that are shown to people, in the order of the display.

    The metrics of the run's model come first, beginning with the most important. Then come metrics
    of trainings, and metrics of models that clients derive from the run's model (few runs).
    """
    shown = {name: CLASSIFICATION[name] for name in _SHOWN}
    shown[f"{TRAINING}loss"] = Measure(label="training loss")  # the only metric of some tasks
    if status is not None and status.measures:
        shown = {
            each.name: Measure(
                label=each.label or each.name,
                unit=each.unit,
                higher_is_better=each.higher_is_better,
            )
            for each in status.measures
        }
    own = {name: each for name, each in shown.items() if not name.startswith(TRAINING)}
    return shown | of_model(own, MeasuredModel.TUNED) | of_model(own, MeasuredModel.PERSONAL)


def spread_measures(status: operator_pb2.RunStatus | None) -> dict[str, str]:
    """Return the metrics whose spread over clients is shown, by name, each with a label.

    The label names the mean of the worst tenth of clients. For each model that clients may measure,
    only the most important metric is included.
    """
    first = next(iter(shown_measures(status))) if status and status.measures else _FIRST
    return {
        f"{model}{first}": f"{model.rstrip('_')} worst tenth".strip() for model in MeasuredModel
    }


def state_counts(progress: operator_pb2.RoundProgress) -> list[tuple[str, int, bool]]:
    """Return the states of a round's members: name, number of members, True for a problem.

    States that are problems are last.
    """
    counts = Counter(member.state for member in progress.members)
    found = [(member_state_name(state), counts[state]) for state in sorted(counts)]
    marked = [(name, members, name in TROUBLED) for name, members in found]
    return sorted(marked, key=lambda each: each[2])


def fraction_done(progress: operator_pb2.RoundProgress) -> float:
    """Return the finished share of a round's training, in [0, 1]; a lost client counts as done."""
    if not progress.members:
        return 0.0
    done = [
        1.0
        if member_state_name(member.state) in _TRAINED | LEFT_OUT
        else min(max(member.fraction, 0.0), 1.0)
        for member in progress.members
    ]
    return sum(done) / len(done)
