"""Messages about a run, for operators who watch it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

import structlog

from potluck.common.errors import PotluckError, StorageError
from potluck.common.learning.measures import shown_measures
from potluck.common.plain_text import plain
from potluck.common.records.round_message import coverage_message, round_message
from potluck.rpc.v1 import coordinator_pb2, operator_pb2
from potluck.server.clock import utc
from potluck.server.machine.waiting import Waiting
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.store.records import MemberState, RoundRow, RunRow, RunState
from potluck.server.store.round_record import round_record
from potluck.server.store.store_thread import InStore

# Messages -----------------------------------------------------------------------------------------

_RUN_STATES = {
    RunState.WAITING: operator_pb2.RUN_STATE_WAITING,
    RunState.RUNNING: operator_pb2.RUN_STATE_RUNNING,
    RunState.FINISHED: operator_pb2.RUN_STATE_FINISHED,
    RunState.STOPPED: operator_pb2.RUN_STATE_STOPPED,
    RunState.FAILED: operator_pb2.RUN_STATE_FAILED,
}
_MEMBER_STATES = {
    MemberState.SELECTED: operator_pb2.MEMBER_STATE_SELECTED,
    MemberState.RECEIVED: operator_pb2.MEMBER_STATE_INCLUDED,
    MemberState.INCLUDED: operator_pb2.MEMBER_STATE_INCLUDED,
    MemberState.LOST: operator_pb2.MEMBER_STATE_LOST,
    MemberState.FAILED: operator_pb2.MEMBER_STATE_FAILED,
    MemberState.LATE: operator_pb2.MEMBER_STATE_LATE,
    MemberState.SPARED: operator_pb2.MEMBER_STATE_SPARED,
}
_STAGES = {
    coordinator_pb2.Progress.STAGE_DOWNLOADING: operator_pb2.MEMBER_STATE_DOWNLOADING,
    coordinator_pb2.Progress.STAGE_COMPUTING: operator_pb2.MEMBER_STATE_TRAINING,
    coordinator_pb2.Progress.STAGE_UPLOADING: operator_pb2.MEMBER_STATE_UPLOADING,
}

_AWAY_NAMED = 20
_LABEL = 40
_UNREAD = 1000  # a watcher with more unread events is disconnected; it may watch again

Event = operator_pb2.WatchRunResponse


class RunFeed:
    """Sends a run's events to all watchers."""

    def __init__(self) -> None:
        self._watchers: set[asyncio.Queue[Event | None]] = set()
        self._notices: list[Event] = []
        self._closed = False

    def watch(self) -> asyncio.Queue[Event | None]:
        """Return a queue that gets all events from now on, and None after the last one."""
        watcher: asyncio.Queue[Event | None] = asyncio.Queue()
        for notice in self._notices:
            watcher.put_nowait(notice)
        if self._closed:
            watcher.put_nowait(None)
        else:
            self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: asyncio.Queue[Event | None]) -> None:
        """Stop sending events to a watcher."""
        self._watchers.discard(watcher)

    def publish(self, event: Event) -> None:
        """Send an event to all watchers."""
        for watcher in list(self._watchers):
            if watcher.qsize() >= _UNREAD:
                self._watchers.discard(watcher)
                watcher.put_nowait(None)
            else:
                watcher.put_nowait(event)

    def say(self, text: str, at: datetime, *, warning: bool) -> None:
        """Publish a notice. Operators that start to watch later also get the latest notices."""
        notice = operator_pb2.Notice(warning=warning, text=text)
        notice.at.FromDatetime(at)
        event = Event(notice=notice)
        self._notices = [*self._notices[-19:], event]
        self.publish(event)

    def close(self) -> None:
        """End the feed: the run is over."""
        self._closed = True
        for watcher in self._watchers:
            watcher.put_nowait(None)
        self._watchers.clear()


def run_status(
    row: RunRow, waiting: operator_pb2.Waiting | None = None, left_out: str = ""
) -> operator_pb2.RunStatus:
    """Return the message with a run's state, its current wait for clients, and the excluded clients
    with reasons."""
    status = operator_pb2.RunStatus(
        run_id=row.run_id,
        name=row.name,
        state=_RUN_STATES[row.state],
        reason=row.reason,
        committed_rounds=row.committed_rounds,
        rounds=row.rounds,
        task=row.task,
        selector=row.selector,
        strategy=row.strategy,
        model_blake3=row.model_blake3 or "",
        initial_model_blake3=row.initial_model_blake3 or "",
        count=row.count,
        seed=row.seed,
        waiting=waiting,
        left_out=left_out,
        best=best_message(row),
        measures=[
            operator_pb2.DeclaredMeasure(
                name=name,
                label=plain(measure.label, _LABEL),
                unit=plain(measure.unit, _LABEL),
                higher_is_better=measure.higher_is_better,
            )
            for name, measure in shown_measures(row.measures).items()
        ],
    )
    status.created_at.FromDatetime(row.created_at)
    return status


def best_message(row: RunRow) -> operator_pb2.BestModel | None:
    """Return a run's best model so far; None if the run has none."""
    best = row.best
    if best is None or best.round is None or best.value is None:
        return None
    behind = row.best_coverage.get(best.measure)
    return operator_pb2.BestModel(
        measure=best.measure,
        round=best.round,
        value=best.value,
        model_blake3=row.best_model_blake3 or "",
        stalled=best.stalled,
        coverage=None if behind is None else coverage_message(behind),
    )


def waiting_message(
    waiting: Waiting, until: datetime | None, away: Sequence[str]
) -> operator_pb2.Waiting:
    """Return the message for a run's wait. until: UTC time at which it ends; None for no limit."""
    message = operator_pb2.Waiting(
        what=waiting.what,
        clients=waiting.clients,
        clients_needed=waiting.clients_needed,
        hosts=waiting.hosts,
        hosts_needed=waiting.hosts_needed,
        away=away[:_AWAY_NAMED],
        away_count=len(away),
    )
    if until is not None:
        message.until.FromDatetime(until)
    return message


def member_message(
    client: str,
    host: str,
    reason: str,
    state: MemberState,
    trouble: str,
    update: SpooledUpdate | None,
    progress: coordinator_pb2.Progress | None,
) -> operator_pb2.Member:
    """Return the message for a client in the current round."""
    shown = _MEMBER_STATES[state]
    if state is MemberState.SELECTED and progress is not None:
        shown = _STAGES.get(progress.stage, shown)
    fraction = 1.0 if update is not None else progress.fraction if progress else 0.0
    return operator_pb2.Member(
        client_id=client,
        host_id=host,
        state=shown,
        reason=reason,
        trouble=trouble,
        fraction=min(max(fraction, 0.0), 1.0) if fraction == fraction else 0.0,
        samples=update.row.samples if update else 0,
        seconds=update.row.seconds if update else 0.0,
    )


def committed_round_message(row: RoundRow) -> operator_pb2.CommittedRound:
    """Return the message for a committed round."""
    return round_message(round_record(row))


# The row and its notices --------------------------------------------------------------------------

log = structlog.get_logger()


class RunRecord:
    """Holds a run's row and feed, for as long as the run's driver exists."""

    def __init__(self, row: RunRow, in_store: InStore) -> None:
        self.row = row
        """The run's row in the store."""
        self.feed = RunFeed()
        self.log = log.bind(run=row.run_id)
        self._in_store = in_store

    def say(self, text: str, *, warning: bool = False) -> None:
        """Publish a notice for operators."""
        (self.log.warning if warning else self.log.info)(text)
        self.feed.say(text, utc(), warning=warning)

    def warn(self, text: str) -> None:
        """Publish a warning for operators."""
        self.say(text, warning=True)

    def reason(self, error: PotluckError) -> str:
        """Return the text for a run's failure; if a disk or database failed, add how to resume the
        run."""
        if not isinstance(error, StorageError):
            return error.message
        return f"{error.message}; then `potluck resume {self.row.run_id}`"

    async def set_state(self, state: RunState, reason: str) -> None:
        """Store the run's new state and publish it."""
        run_id = self.row.run_id
        await self._in_store(lambda store: store.set_run_state(run_id, state, reason, utc()))
        self.row = await self._in_store(lambda store: store.run(run_id))
