"""Events of a run as plain lines, for logs and pipes."""

from __future__ import annotations

from datetime import UTC, datetime

from potluck.deploy.operator.run_view import LEFT_OUT, RunView, run_state_name, waiting_text
from potluck.deploy.view.readable import (
    readable_bytes,
    readable_number,
    readable_seconds,
    readable_share,
)
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import RunState

_STATE_TEXT = {
    RunState.RUN_STATE_WAITING: "is waiting",
    RunState.RUN_STATE_RUNNING: "is running",
    RunState.RUN_STATE_FINISHED: "is finished",
    RunState.RUN_STATE_STOPPED: "was stopped",
    RunState.RUN_STATE_FAILED: "failed",
}


def status_line(status: operator_pb2.RunStatus) -> str:
    """A run's status, in one line."""
    state = _STATE_TEXT.get(status.state, f"is {run_state_name(status.state)}")
    reason = f": {status.reason}" if status.reason else ""
    if status.HasField("waiting"):
        reason += f": {waiting_text(status.waiting, datetime.now(UTC))}"
    return (
        f"run {status.run_id} ({status.name}) {state}{reason}; "
        f"{status.committed_rounds} of {status.rounds} rounds committed"
    )


def round_line(committed: operator_pb2.CommittedRound, rounds: int) -> str:
    """A committed round, in one line."""
    metrics = committed.metrics
    parts = [f"round {committed.round}/{rounds}", f"cohort {cohort_text(committed)}"]
    if metrics.HasField("loss"):
        parts.append(f"loss {readable_number(metrics.loss)}")
    if metrics.HasField("accuracy"):
        parts.append(f"accuracy {readable_share(metrics.accuracy)}")
    if metrics.HasField("worst_group_accuracy"):
        parts.append(f"worst group {readable_share(metrics.worst_group_accuracy)}")
    parts.append(readable_seconds(committed.seconds))
    parts.append(f"down {readable_bytes(committed.bytes_down)}")
    parts.append(f"up {readable_bytes(committed.bytes_up)}")
    return "  ".join(parts)


def cohort_text(committed: operator_pb2.CommittedRound) -> str:
    """Size of a cohort; `included/selected` where some dropped out."""
    selected = len(committed.members)
    left_out = sum(member.state in LEFT_OUT for member in committed.members)
    return f"{selected - left_out}/{selected}" if left_out else str(selected)


def notice_line(notice: operator_pb2.Notice) -> str:
    """A notice, in one line."""
    return f"{'warning: ' if notice.warning else ''}{notice.text}"


def event_line(view: RunView, event: operator_pb2.WatchRunResponse) -> str | None:
    """The line for an event, given the run as seen after it; None for mere progress."""
    match event.WhichOneof("event"):
        case "status":
            return status_line(event.status)
        case "committed":
            return round_line(event.committed, view.status.rounds if view.status else 0)
        case "notice":
            return notice_line(event.notice)
        case _:
            return None
