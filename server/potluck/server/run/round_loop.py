"""The loop of a prepared run: passes events to the state machine, and carries out the machine's
actions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from potluck.common.errors import PluginError, PotluckError, disk_error
from potluck.common.learning.task_failures import plugin_failure
from potluck.server.clock import now
from potluck.server.live.live_status import publish_status
from potluck.server.live.run import Run
from potluck.server.machine import events as rounds
from potluck.server.machine.machine import Phase
from potluck.server.run.commit import PostCommitTasks, commit, evaluate, reduce
from potluck.server.run.train import Training
from potluck.server.select.select import admit, select
from potluck.server.select.selection_record import record_of
from potluck.server.select.upload_decision import decide_uploads
from potluck.server.updates.update_inbox import UpdateInbox
from potluck.server.updates.update_path import UpdatePath


class RoundLoop:
    """Runs all rounds of a run. Used on the event loop."""

    def __init__(self, run: Run, end: Callable[[rounds.End], Awaitable[None]]) -> None:
        """end: function that carries out the action that ends the run."""
        self.run = run
        self._end = end
        self._attendance = run.services.attendance
        self._path = _path_of(run)
        self.inbox = UpdateInbox(run, self._path)
        self._record = record_of(run)
        self._training = Training(run, self._path, self.inbox, self._record)
        self._post_commit = PostCommitTasks(run)
        self._slow: asyncio.Task[None] | None = None
        self._stop_listening: Callable[[], None] = lambda: None

    # Files ------------------------------------------------------------------------------------

    def files_in_use(self) -> set[str]:
        """Return the digests of files that must not be deleted now."""
        run = self.run
        of_profiles = run.selecting.profiling.model
        profiles = set() if of_profiles is None else of_profiles.digests
        late = {row.model_blake3 for row in run.updates.late.awaited}
        return run.models.digests | profiles | late | self._training.auxiliaries.digests

    # Events -----------------------------------------------------------------------------------

    async def go(self) -> None:
        """Run rounds until the run has ended."""
        run = self.run
        await run.selecting.read_quarantine()
        self._stop_listening = self._attendance.listen(self._on_attendance)
        run.updates.post_awaited()
        await self._await_late()
        run.post(rounds.Started())
        self._on_attendance(self._attendance.clients, joined=True)
        while run.machine.phase is not Phase.ENDED:
            event = await self._next_event()
            actions = run.machine.handle(event, now())
            run.services.observer.noted(event, actions, run.machine.phase)
            if run.services.spans is not None:
                key = (run.machine.round, run.machine.attempt)
                run.services.spans.noted(event, actions, run.machine.phase, key)
            for action in actions:
                await self._carry_out(action)

    async def _await_late(self) -> None:
        """Instruct clients whose updates missed their round to continue their training."""
        for row in self.run.updates.late.awaited:
            if row.update is None:
                await self._training.begin_late(row)

    async def fail(self, reason: str) -> None:
        """End the run with a failure that did not come from the state machine."""
        actions = self.run.machine.handle(rounds.ActionFailed(reason), now())
        for action in actions or [rounds.End(rounds.RunEnding.FAILED, reason)]:
            await self._carry_out(action)

    async def settle(self) -> None:
        """Stop all work at the end of the run; wait for the work after its last commit."""
        if self._slow is not None:
            self._slow.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._slow
        self.run.updates.let_go(self.run.updates.late.awaited)
        await self._path.give_up()
        await self._post_commit.settled()

    async def stop(self) -> None:
        """Stop all work, because this coordinator no longer drives the run."""
        self._stop_listening()
        if self._slow is not None:
            self._slow.cancel()
            await asyncio.wait({self._slow})
        self._post_commit.stop()
        self._path.stop()

    async def _next_event(self) -> rounds.Event:
        run = self.run
        with contextlib.suppress(asyncio.QueueEmpty):
            return run.events.get_nowait()  # events have precedence over timers
        wakeup = run.machine.next_wakeup()
        timeout = None if wakeup is None else max(0.0, wakeup - now())
        try:
            async with asyncio.timeout(timeout):
                return await run.events.get()
        except TimeoutError:
            pass
        # An update that arrived in time counts as in time, even if a slow database stores it late.
        await self.inbox.recorded()
        with contextlib.suppress(asyncio.QueueEmpty):
            return run.events.get_nowait()
        return rounds.TimerFired()

    def _on_attendance(self, clients: tuple[str, ...], joined: bool) -> None:
        if not joined:
            self.run.post(rounds.Left(clients))
            return
        self.run.selecting.left_out.welcome(clients)
        sessions = {client: self._attendance.session_of(client) for client in clients}
        hosts = {client: session.host_id for client, session in sessions.items() if session}
        self.run.post(rounds.Joined(clients, hosts))

    # Actions ----------------------------------------------------------------------------------

    async def _carry_out(self, action: rounds.Action) -> None:
        run = self.run
        match action:
            case rounds.Admit(clients):
                await admit(run, clients)
            case rounds.LeaveOut(clients):
                await run.selecting.left_out.store(clients)
                publish_status(run)
            case rounds.Readmit(clients):
                await run.selecting.left_out.remove_from_store(clients)
                publish_status(run)
            case rounds.Select():
                self._begin_slow(select(run, self._path, self._record, action))
            case rounds.Train(client):
                await self._training.begin(client)
            case rounds.DecideUploads():
                self._begin_slow(decide_uploads(run, action))
            case rounds.Abandon():
                self._training.abandon(action)
            case rounds.MarkMember():
                await self._training.mark(action)
            case rounds.GiveUpAttempt():
                await self._training.give_up(action)
            case rounds.Reduce(clients):
                self._begin_slow(reduce(run, self._path, clients))
            case rounds.Evaluate():
                self._begin_slow(evaluate(run))
            case rounds.Commit():
                self._begin_slow(commit(run, action, self._record, self._post_commit))
            case rounds.PublishNotice(text, warning):
                run.say(text, warning=warning)
            case rounds.End():
                await self._end(action)

    def _begin_slow(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a slow action in a task, so that events are still handled."""
        self._slow = asyncio.create_task(self._guarded(work))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        run = self.run
        try:
            await work
        except PotluckError as error:
            run.post(rounds.ActionFailed(run.record.reason(error)))
        except Exception as error:
            failure = plugin_failure(error, run.plan.plugins, run.machine.round)
            if failure:
                run.log.exception("plug-in failed", round=run.machine.round)
                run.post(rounds.ActionFailed(failure))
            elif isinstance(error, OSError):
                error_of_disk = disk_error(error, "the state directory")
                run.post(rounds.ActionFailed(run.record.reason(error_of_disk)))
            else:
                run.log.exception("round failed unexpectedly")
                run.post(rounds.ActionFailed(f"unexpected {type(error).__name__}: {error}"))


def _path_of(run: Run) -> UpdatePath:
    """Return the object that handles the run's updates: open, masked or summed. Raises PluginError
    if it does not implement UpdatePath."""
    found = run.plan.path
    if not issubclass(found, UpdatePath):
        raise PluginError(f"{found.group}: {found.__name__} must derive from UpdatePath")
    return found(run)
