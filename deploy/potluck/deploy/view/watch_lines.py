"""Events of a run as plain lines, for logs and pipes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import zip_longest

from potluck.common.learning.spread import Coverage
from potluck.common.records.round import LEFT_OUT, Round
from potluck.common.records.round_message import round_of
from potluck.deploy.operator.run_view import (
    RunView,
    run_state_name,
    shown_measures,
    spread_measures,
    waiting_text,
)
from potluck.deploy.view.readable import (
    readable_age,
    readable_bytes,
    readable_coverage,
    readable_measure,
    readable_privacy,
    readable_seconds,
)
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import RunState

_OLD = timedelta(seconds=10)
_STATE_TEXT = {
    RunState.RUN_STATE_WAITING: "is waiting",
    RunState.RUN_STATE_RUNNING: "is running",
    RunState.RUN_STATE_FINISHED: "is finished",
    RunState.RUN_STATE_STOPPED: "was stopped",
    RunState.RUN_STATE_FAILED: "failed",
}


def status_line(status: operator_pb2.RunStatus) -> str:
    """Return a run's status in one line."""
    state = _STATE_TEXT.get(status.state, f"is {run_state_name(status.state)}")
    reason = f": {status.reason}" if status.reason else ""
    if status.HasField("waiting"):
        reason += f": {waiting_text(status.waiting, datetime.now(UTC))}"
    return (
        f"run {status.run_id} ({status.name}) {state}{reason}; "
        f"{status.committed_rounds} of {status.rounds} rounds committed"
    )


def round_line(committed: Round, status: operator_pb2.RunStatus | None) -> str:
    """Return a committed round of a run in one line."""
    metrics, rounds = committed.measures, status.rounds if status else 0
    parts = [f"round {committed.number}/{rounds}", f"cohort {cohort_text(committed)}"]
    coverage, shown = committed.coverage, shown_measures(status)
    names = [name for name in shown if name in metrics or is_missing(coverage.get(name))]
    for name, following in zip_longest(names, names[1:]):
        parts.append(f"{shown[name].label} {readable_measure(metrics.get(name), shown[name].unit)}")
        here = coverage.get(name)
        if here is not None and here != coverage.get(following):  # equal coverage: state it once
            parts.append(f"over {readable_coverage(here)}")
    for name, label in spread_measures(status).items():
        if name in committed.spreads:
            spread, measure = committed.spreads[name], shown[name]
            worst = readable_measure(spread.worst_tenth, measure.unit)
            parts.append(f"{label} {worst} of {readable_coverage(spread.coverage)}")
    if committed.privacy is not None:
        parts.append(readable_privacy(committed.privacy))
    parts.append(readable_seconds(committed.seconds))
    parts.append(f"down {readable_bytes(committed.bytes_down)}")
    sums = f" in {committed.sums} sums" if committed.sums else ""
    parts.append(f"up {readable_bytes(committed.bytes_up)}{sums}")
    return "  ".join(parts)


def is_missing(coverage: Coverage | None) -> bool:
    """Return True if clients were asked for a metric, and none of them measured it."""
    return coverage is not None and coverage.asked > 0 and not coverage.clients


def cohort_text(committed: Round) -> str:
    """Return the size of a cohort.

    The text is `included/selected` if clients dropped out, and ends with `+2 late` if two late
    updates joined.
    """
    selected = len(committed.members)
    left_out = sum(member.state in LEFT_OUT for member in committed.members)
    size = f"{selected - left_out}/{selected}" if left_out else str(selected)
    return f"{size} +{len(committed.late)} late" if committed.late else size


def notice_text(notice: operator_pb2.Notice) -> str:
    """Return a notice's text, with its age if it is not new.

    A watcher receives earlier notices after the rounds that were committed since then.
    """
    if not notice.HasField("at"):
        return notice.text
    at, now = notice.at.ToDatetime(tzinfo=UTC), datetime.now(UTC)
    return f"{notice.text} ({readable_age(at, now)})" if now - at > _OLD else notice.text


def event_line(view: RunView, event: operator_pb2.WatchRunResponse) -> str | None:
    """Return the line for an event; None for progress. view: the run after the event."""
    match event.WhichOneof("event"):
        case "status":
            return status_line(event.status)
        case "committed":
            return round_line(round_of(event.committed), view.status)
        case "notice":
            return f"{'warning: ' if event.notice.warning else ''}{notice_text(event.notice)}"
        case _:
            return None
