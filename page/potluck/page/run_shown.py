"""Views of a run for the web UI, made from the run as an operator sees it. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from potluck.common.learning.measures import MeasuredModel
from potluck.common.records.privacy_loss import RoundPrivacy
from potluck.common.records.round import LEFT_OUT, Round
from potluck.common.records.round_message import member_state_name
from potluck.common.run_file.runfile import OLD_KEYS, stored_values
from potluck.deploy.operator.run_view import (
    ENDED,
    RunView,
    fraction_done,
    run_state_name,
    shown_measures,
    state_counts,
    waiting_text,
)
from potluck.deploy.view.run_summary import CoverageSummary, MeasureSummary
from potluck.deploy.view.watch_table import PHASES
from potluck.page.page_shapes import (
    CohortShown,
    ComparisonShown,
    Difference,
    LiveShown,
    MemberShown,
    NoiseShown,
    NoticeShown,
    RoundDetails,
    RoundShown,
    RunShown,
    StateCount,
    StatusShown,
)
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import MemberState, RunState

# A run --------------------------------------------------------------------------------------------

MOST_ROUNDS = 2000
"""Maximum number of a run's rounds that are shown, the newest ones."""

_RESUMABLE = frozenset({RunState.RUN_STATE_STOPPED, RunState.RUN_STATE_FAILED})
_AT_WORK = frozenset(
    {
        MemberState.MEMBER_STATE_SELECTED,
        MemberState.MEMBER_STATE_DOWNLOADING,
        MemberState.MEMBER_STATE_TRAINING,
        MemberState.MEMBER_STATE_UPLOADING,
    }
)
_SLOW = 1.5
"""Factor on the median time of the finished clients; a client that takes longer is a straggler."""
_ALWAYS = 2
"""Number of metrics that are shown while no round has any."""


class ClientList:
    """A run's clients in the order of their first appearance; the list only grows."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """All clients in the list."""
        return list(self._places)

    def place(self, client: str) -> int:
        """Return a client's index in the list, from 0; append a new client."""
        return self._places.setdefault(client, len(self._places))

    def since(self, known: int) -> list[str]:
        """Return the clients in the list after the first `known`."""
        return self.names[known:]


def moment(stamp: Timestamp) -> str | None:
    """Return a time in ISO 8601; None if it is not set."""
    if not stamp.seconds and not stamp.nanos:
        return None
    return stamp.ToDatetime(tzinfo=UTC).isoformat()


def shown_status(status: operator_pb2.RunStatus, now: datetime) -> StatusShown:
    """Return the view of a run's status."""
    waits = status.HasField("waiting")
    why = waiting_text(status.waiting, now) if waits else status.reason
    return StatusShown(
        run=status.run_id,
        name=status.name,
        state=run_state_name(status.state),
        why="; ".join(filter(None, [why, status.left_out])),
        committed=status.committed_rounds,
        rounds=status.rounds,
        task=status.task,
        selector=status.selector,
        strategy=status.strategy,
        count=status.count,
        seed=status.seed,
        created_at=moment(status.created_at) or "",
        model=status.model_blake3 or None,
        can_stop=status.state not in ENDED,
        can_resume=status.state in _RESUMABLE,
    )


def shown_run(view: RunView, clients: ClientList, now: datetime) -> RunShown | None:
    """Return the whole view of a run; None before its first event. Adds clients to `clients`."""
    if view.status is None:
        return None
    newest = view.rounds[-MOST_ROUNDS:]
    return RunShown(
        status=shown_status(view.status, now),
        measures=shown_summaries(view),
        rounds=[shown_round(each, clients) for each in newest],
        clients=clients.names,
        earlier=newest[0].number - 1 if newest else 0,
        cohort=None if view.progress is None else shown_cohort(view.progress),
        live=None if view.progress is None else shown_live(view.progress),
        notices=[shown_notice(each) for each in view.notices],
    )


def shown_summaries(view: RunView) -> list[MeasureSummary]:
    """Return the metrics that a round has, the most important first; before that, the first two."""
    known = {name for each in view.committed.values() for name in each.measures}
    return [
        MeasureSummary(
            name=name,
            label=each.label,
            unit=each.unit,
            higher_is_better=each.higher_is_better,
        )
        for place, (name, each) in enumerate(shown_measures(view.status).items())
        if name in known or (place < _ALWAYS and not known and not _of_clients(name))
    ]


def shown_round(committed: Round, clients: ClientList) -> RoundShown:
    """Return the view of a committed round. Adds its clients to `clients`."""
    places = [clients.place(client) for client in committed.cohort]
    states = [member.state for member in committed.members]
    return RoundShown(
        round=committed.number,
        values=dict(committed.measures),
        worst_tenth=committed.worst_tenths,
        coverage={name: CoverageSummary.of(each) for name, each in committed.coverage.items()},
        spread_coverage={
            name: CoverageSummary.of(each.coverage) for name, each in committed.spreads.items()
        },
        seconds=committed.seconds,
        bytes_down=committed.bytes_down,
        bytes_up=committed.bytes_up,
        cohort=places,
        left_out=[place for place, state in zip(places, states, strict=True) if state in LEFT_OUT],
        late=len(committed.late),
        noise=_noise(committed.privacy),
    )


def _noise(found: RoundPrivacy | None) -> NoiseShown | None:
    if found is None:
        return None
    return NoiseShown(**{name: getattr(found, name) for name in NoiseShown.model_fields})


def shown_details(committed: Round) -> RoundDetails:
    """Return the clients of a committed round and why each was selected, in selection order."""
    return RoundDetails(
        round=committed.number,
        members=[
            MemberShown(
                client=member.client,
                host=member.host,
                state=member.state,
                reason=member.reason,
                trouble=member.trouble,
                samples=member.samples,
                seconds=member.seconds,
            )
            for member in committed.members
        ],
    )


def shown_cohort(progress: operator_pb2.RoundProgress) -> CohortShown:
    """Return the clients of the current round and why each was selected."""
    return CohortShown(
        round=progress.round,
        attempt=progress.attempt,
        clients=[member.client_id for member in progress.members],
        hosts=[member.host_id for member in progress.members],
        reasons=[member.reason for member in progress.members],
    )


def shown_live(progress: operator_pb2.RoundProgress) -> LiveShown:
    """Return the progress of the current round."""
    phase = PHASES.get(progress.phase, progress.phase)
    if progress.HasField("trained"):
        phase = f"coordinator trains, {progress.trained:.0%}"
    return LiveShown(
        round=progress.round,
        attempt=progress.attempt,
        phase=phase,
        seconds=round(progress.seconds, 1),
        done=round(fraction_done(progress), 3),
        bytes_down=progress.bytes_down,
        bytes_up=progress.bytes_up,
        counts=[
            StateCount(state=state, clients=members, troubled=troubled)
            for state, members, troubled in state_counts(progress)
        ],
        states=[member_state_name(member.state) for member in progress.members],
        fractions=[_fraction(member) for member in progress.members],
        troubles={
            place: member.trouble for place, member in enumerate(progress.members) if member.trouble
        },
        stragglers=stragglers(progress),
    )


def stragglers(progress: operator_pb2.RoundProgress) -> list[int]:
    """Return the indices of clients that are late, once half of the cohort has finished.

    A client is late if it still works when the round has taken more than `_SLOW` times the finished
    clients' median time.
    """
    members = progress.members
    done = sorted(member.seconds for member in members if member.seconds > 0)
    at_work = [place for place, member in enumerate(members) if member.state in _AT_WORK]
    if 2 * len(done) < len(members) or not done:
        return []
    usual = statistics.median(done)
    return at_work if progress.seconds > _SLOW * usual else []


def shown_notice(notice: operator_pb2.Notice) -> NoticeShown:
    """Return the view of a notice."""
    return NoticeShown(at=moment(notice.at), warning=notice.warning, text=notice.text)


def changed_cohort(
    before: operator_pb2.RoundProgress | None, after: operator_pb2.RoundProgress
) -> bool:
    """Return True if the cohort differs from the one before."""
    return before is None or _identity(before) != _identity(after)


def _identity(progress: operator_pb2.RoundProgress) -> tuple[int, int, int]:
    return progress.round, progress.attempt, len(progress.members)


def _fraction(member: operator_pb2.Member) -> float:
    if member_state_name(member.state) in LEFT_OUT:
        return 0.0
    if member.state == MemberState.MEMBER_STATE_INCLUDED:
        return 1.0
    return round(min(max(member.fraction, 0.0), 1.0), 2)


def _of_clients(measure: str) -> bool:
    return measure.startswith((MeasuredModel.TUNED, MeasuredModel.PERSONAL))


# Comparison of runs -------------------------------------------------------------------------------

MOST_RUNS = 6
"""Maximum number of runs compared at once; more colours can't be distinguished."""
_ABSENT = "–"
_NO_SETTING = frozenset({"name"})


def compared(runs: Sequence[RunShown], run_files: Sequence[str]) -> ComparisonShown:
    """Return the runs, and the settings in which their run files differ, in the files' order."""
    tables = [stored_values(text) for text in run_files]
    current = [{OLD_KEYS.get(key, key): each[key] for key in each} for each in tables]
    settings = [dict(_settings(table)) for table in current]
    keys = dict.fromkeys(key for each in settings for key in each if key not in _NO_SETTING)
    found = {key: [each.get(key, _ABSENT) for each in settings] for key in keys}
    return ComparisonShown(
        runs=list(runs),
        differences=[
            Difference(key=key, values=values)
            for key, values in found.items()
            if len(set(values)) > 1
        ],
    )


def _settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a TOML table as text, by dotted key."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text
