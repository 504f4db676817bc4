"""Runs that pages show: each run is followed once, for any number of pages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from datetime import UTC, datetime

from pydantic import BaseModel

from potluck.common.errors import NotFoundError, PotluckError
from potluck.common.records.round import Round
from potluck.deploy.operator.run_view import (
    ENDED,
    RunView,
    is_news,
    observe,
    shown_measures,
)
from potluck.deploy.view.watch import pause_seconds
from potluck.page.coordinator_link import CoordinatorLink, PageFaultError, trouble_of
from potluck.page.event_stream import Listener, encoded
from potluck.page.page_shapes import (
    CohortShown,
    LiveShown,
    RoundShown,
    RunShown,
)
from potluck.page.run_shown import (
    MOST_ROUNDS,
    ClientList,
    changed_cohort,
    shown_cohort,
    shown_live,
    shown_notice,
    shown_round,
    shown_run,
    shown_status,
    shown_summaries,
)
from potluck.rpc.v1 import operator_pb2

LIVE_SECONDS = 0.5
"""Seconds between two events about the current round."""
FAULT_SECONDS = 30.0
"""Seconds after which a run is followed again, if the server failed while it followed the run."""
LINGER_SECONDS = 30.0
"""Seconds for which a run is still followed after the last page has left it."""
MOST_KEPT = 12
"""Maximum number of ended runs that are kept although no page shows them."""


class RoundEvent(BaseModel):
    """A committed round. new_clients: clients that the page appends to those that it knows."""

    round: RoundShown
    new_clients: list[str]


class LiveEvent(BaseModel):
    """The current round, with its cohort if the cohort has changed."""

    live: LiveShown | None
    cohort: CohortShown | None


class GoneEvent(BaseModel):
    """The run is no longer followed until a page requests it again.

    trouble: `missing`, `fault`, or the connection's trouble.
    """

    error: str
    trouble: str


class RunWatch:
    """The current view of a run, and the pages that show it."""

    def __init__(self, run_id: str, link: CoordinatorLink) -> None:
        self.run_id = run_id
        self.view = RunView()
        self.last_used = time.monotonic()
        self._link = link
        self._clients = ClientList()
        self._measures: list[str] = []
        self._listeners: set[Listener] = set()
        self._asking = 0
        self._live_at = 0.0
        self._begin_at = 0.0
        self._heard = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: PotluckError | None = None

    @property
    def idle(self) -> bool:
        """True if no page shows the run."""
        return not self._listeners and not self._asking

    @property
    def following(self) -> bool:
        """True while the coordinator's events are received."""
        return self._task is not None and not self._task.done()

    def begin(self) -> None:
        """Follow the run, unless it is already followed or has ended."""
        self.last_used = time.monotonic()
        if not self.following and not self.view.ended and self.last_used >= self._begin_at:
            self._error = None
            self._heard.clear()
            self._task = asyncio.create_task(self._follow())

    def again(self) -> None:
        """Follow the run again: it had ended and was resumed."""
        if self.view.status is not None and self.view.ended:
            self.view = RunView(committed=self.view.committed, notices=self.view.notices)
        self.begin()

    async def shown(self) -> RunShown:
        """Wait for the run's state and return the whole view. Raises PotluckError."""
        self.begin()
        self._asking += 1
        try:
            await self._heard.wait()
        finally:
            self._asking -= 1
        if self._error is not None:
            raise self._error
        found = shown_run(self.view, self._clients, datetime.now(UTC))
        if found is None:
            raise NotFoundError(f"the coordinator sent no status of run {self.run_id}")
        return found

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Send events to a page while the block runs."""
        self.begin()
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)
            self.last_used = time.monotonic()

    def all_anew(self) -> Iterable[bytes]:
        """Return the whole view as one event; no events before the run's state is known.

        If the run is no longer followed, an event with the reason is added.
        """
        found = shown_run(self.view, self._clients, datetime.now(UTC))
        events = [] if found is None or not self._heard.is_set() else [encoded("run", found)]
        return events if self._error is None else [*events, _gone(self._error)]

    async def close(self) -> None:
        """Stop following the run."""
        for listener in self._listeners:
            listener.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # Following --------------------------------------------------------------------------------

    async def _follow(self) -> None:
        failures = 0
        while not self.view.ended:
            try:
                async for event in self._events():
                    failures = 0
                    self._see(event)
            except PotluckError as error:
                lost = trouble_of(error) in ("lost", "certificate")
                if not (lost and self._heard.is_set()):  # else every page shows the lost connection
                    self._fail(error)
                    return
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            except Exception as error:  # no caller awaits this task: its error would be lost
                self._begin_at = time.monotonic() + FAULT_SECONDS
                self._fail(PageFaultError.of(error))
                return
            failures += 1
            if not self.view.ended:
                await asyncio.sleep(pause_seconds(failures))

    async def _events(self) -> AsyncIterator[operator_pb2.WatchRunResponse]:
        """Yield the coordinator's events about the run. Raises PotluckError."""
        known = max(self.view.committed, default=0)
        newest = 0 if known else MOST_ROUNDS
        try:
            client = await self._link.client()
            stream = client.watch_run(self.run_id, after_round=known, newest_rounds=newest)
            async with aclosing(stream) as events:
                async for event in events:
                    self._link.reached()
                    yield event
        except PotluckError as error:
            raise self._link.blamed(error) from None

    def _fail(self, error: PotluckError) -> None:
        self._error = error
        self._heard.set()
        self._offer(_gone(error))

    def _see(self, event: operator_pb2.WatchRunResponse) -> None:
        before = self.view
        if is_news(before, event):
            # Views share their rounds: `is_news` must run before `observe` adds the event to them.
            self.view = observe(before, event)
            self._forget_old()
            if self._heard.is_set():
                self._publish(before, event)
        status = self.view.status
        if status is not None and not self._heard.is_set() and self._complete(status):
            self._heard.set()
            self._measures = self._measure_names()
            for each in self.all_anew():
                self._offer(each)

    def _forget_old(self) -> None:
        """Drop rounds that are not shown, since a run may have very many."""
        committed = self.view.committed
        if len(committed) > MOST_ROUNDS:
            del committed[min(committed)]

    def _complete(self, status: operator_pb2.RunStatus) -> bool:
        """Return True if all rounds committed so far have been received."""
        return max(self.view.committed, default=0) >= status.committed_rounds

    def _publish(self, before: RunView, event: operator_pb2.WatchRunResponse) -> None:
        match event.WhichOneof("event"):
            case "status":
                self._offer(encoded("status", shown_status(event.status, datetime.now(UTC))))
                if before.progress is not None and self.view.progress is None:
                    self._offer(encoded("live", LiveEvent(live=None, cohort=None)))
            case "committed":
                self._publish_round(self.view.committed[event.committed.round])
            case "progress":
                self._publish_progress(before.progress, event.progress)
            case "notice":
                self._offer(encoded("notice", shown_notice(event.notice)))
            case _:
                return

    def _publish_round(self, committed: Round) -> None:
        if len(self.view.committed) == 1 or self._has_new_measure(committed):
            self._measures = self._measure_names()
            for each in self.all_anew():
                self._offer(each)
            return
        known = len(self._clients.names)
        found = shown_round(committed, self._clients)
        new = self._clients.since(known)
        self._offer(encoded("round", RoundEvent(round=found, new_clients=new)))
        if self.view.progress is None:
            self._offer(encoded("live", LiveEvent(live=None, cohort=None)))

    def _publish_progress(
        self, before: operator_pb2.RoundProgress | None, progress: operator_pb2.RoundProgress
    ) -> None:
        changed = changed_cohort(before, progress)
        now = time.monotonic()
        if not changed and now - self._live_at < LIVE_SECONDS:
            return
        self._live_at = now
        cohort = shown_cohort(progress) if changed else None
        self._offer(encoded("live", LiveEvent(live=shown_live(progress), cohort=cohort)))

    def _has_new_measure(self, committed: Round) -> bool:
        found = committed.measures.keys() & shown_measures(self.view.status).keys()
        return not found <= set(self._measures)

    def _measure_names(self) -> list[str]:
        return [each.name for each in shown_summaries(self.view)]

    def _offer(self, event: bytes) -> None:
        for listener in self._listeners:
            listener.offer(event)


def _gone(error: PotluckError) -> bytes:
    trouble = "missing" if isinstance(error, NotFoundError) else trouble_of(error)
    return encoded("gone", GoneEvent(error=error.message, trouble=trouble))


class RunWatches:
    """The watches of runs that pages show or have shown lately."""

    def __init__(self, link: CoordinatorLink) -> None:
        self._link = link
        self._watches: dict[str, RunWatch] = {}

    def of(self, run_id: str) -> RunWatch:
        """Return the watch of a run, and follow the run from now on."""
        if run_id not in self._watches:
            self._watches[run_id] = RunWatch(run_id, self._link)
        watch = self._watches[run_id]
        watch.begin()
        return watch

    def noticed(self, runs: Iterable[operator_pb2.RunStatus]) -> None:
        """Follow ended runs again that were resumed, according to the coordinator's list."""
        for status in runs:
            watch = self._watches.get(status.run_id)
            if watch is not None and watch.view.ended and status.state not in ENDED:
                watch.again()

    async def tidy(self) -> None:
        """Stop following runs that no page has shown for `LINGER_SECONDS`.

        Ended runs are only dropped if more than `MOST_KEPT` watches are unused; those shown longest
        ago are dropped first.
        """
        now = time.monotonic()
        idle = [each for each in self._watches.values() if each.idle]
        idle.sort(key=lambda each: each.last_used)
        too_many = len(idle) - MOST_KEPT
        for watch in idle:
            stale = now - watch.last_used > LINGER_SECONDS
            if stale and (not watch.view.ended or too_many > 0):
                too_many -= 1
                self._watches.pop(watch.run_id, None)
                await watch.close()

    async def close(self) -> None:
        """Stop following all runs."""
        for watch in list(self._watches.values()):
            await watch.close()
