"""Drives one run from its start to its end.

Runs on the event loop. Blocking work runs in threads: calls of the store in the store's own thread,
the heavy part of a round (`reduce/model_work.py`) in any thread. State is stored before the
coordinator acts on it.

`resume.py` prepares the run; `round_loop.py` takes it through its rounds.
"""

from __future__ import annotations

import asyncio

from potluck.common.errors import PotluckError
from potluck.common.learning.task_failures import plugin_failure
from potluck.rpc.v1 import operator_pb2
from potluck.server.live.feed import RunFeed, RunRecord, run_status
from potluck.server.live.live_status import progress, status, waiting
from potluck.server.live.run import Run
from potluck.server.live.services import RunServices
from potluck.server.live.spool import Spool
from potluck.server.machine import events as rounds
from potluck.server.plan.plan import RunPlan
from potluck.server.reduce.model_work import ModelWork
from potluck.server.run.resume import resume
from potluck.server.run.round_loop import RoundLoop
from potluck.server.store.records import RunRow, RunState
from potluck.server.updates.update_inbox import UpdateInbox

_STATE_AFTER = {
    rounds.RunEnding.FINISHED: RunState.FINISHED,
    rounds.RunEnding.STOPPED: RunState.STOPPED,
    rounds.RunEnding.FAILED: RunState.FAILED,
}


class RunDriver:
    """Prepares a run, drives it and ends it. Can report the run's status at any time."""

    def __init__(
        self,
        row: RunRow,
        plan: RunPlan,
        work: ModelWork,
        spool: Spool,
        services: RunServices,
    ) -> None:
        self._plan = plan
        self._work = work
        self._spool = spool
        self._services = services
        self._record = RunRecord(row, services.in_store)
        self._events: asyncio.Queue[rounds.Event] = asyncio.Queue()
        self._prepared = asyncio.Event()
        self._loop: RoundLoop | None = None
        self._over = False

    # What others see --------------------------------------------------------------------------

    @property
    def _run(self) -> Run | None:
        """The prepared run; None until it is prepared."""
        return None if self._loop is None else self._loop.run

    @property
    def row(self) -> RunRow:
        """The run's row in the store."""
        return self._record.row

    @property
    def feed(self) -> RunFeed:
        """The events of the run, for watchers."""
        return self._record.feed

    def status(self) -> operator_pb2.RunStatus:
        """The state of the run, with its current wait."""
        return run_status(self.row) if self._run is None else status(self._run)

    def waiting(self) -> operator_pb2.Waiting | None:
        """The current wait of the run; None while a round is under way."""
        return None if self._run is None else waiting(self._run)

    def away_hosts(self) -> list[str]:
        """Disconnected hosts that the run waits for; thread-safe."""
        return [] if self._run is None else self._run.machine.pool.away_hosts()

    def progress(self) -> operator_pb2.RoundProgress | None:
        """The progress of the current round, for display."""
        return None if self._run is None else progress(self._run)

    def why_left_out(self, client: str) -> str:
        """Return why a client can't take part in the run; empty if it can."""
        return "" if self._run is None else self._run.selecting.left_out.troubles.get(client, "")

    async def inbox(self) -> UpdateInbox | None:
        """The inbox of the run; None until the run is prepared, and for a run that ended before it
        was prepared."""
        await self._prepared.wait()
        return None if self._loop is None else self._loop.inbox

    # Files ------------------------------------------------------------------------------------

    def files_in_use(self) -> set[str]:
        """Return the digests of files that must not be deleted now; empty once the run has ended,
        because the retention settings then decide."""
        return set() if self._over or self._loop is None else self._loop.files_in_use()

    def count_down(self, blake3: str, sent: int) -> None:
        """Add to the count of bytes of model files that were sent to hosts. blake3: digest of the
        file."""
        if self._run is not None:
            self._run.updates.bytes_down += sent
            encoding = self._run.models.encoding_of(blake3)
            self._services.observer.sent(encoding, sent)

    # Driving ----------------------------------------------------------------------------------

    def post(self, event: rounds.Event) -> None:
        """Queue an event for the state machine, even if the run is not prepared yet."""
        self._events.put_nowait(event)

    async def exclusion_changed(self) -> None:
        """Reload the clients in quarantine; called after quarantine or membership has changed."""
        if self._run is not None:  # a run that is not prepared yet reads the quarantine later
            await self._run.selecting.read_quarantine()

    async def drive(self) -> None:
        """Drive the run until it ends, or until the task is cancelled because the coordinator
        stops."""
        try:
            run = await resume(
                self._record, self._plan, self._work, self._spool, self._services, self._events
            )
            if run is None:
                await self._end(rounds.End(rounds.RunEnding.STOPPED, rounds.STOPPED_BY_OPERATOR))
                return
            self._loop = RoundLoop(run, self._end)
            self._prepared.set()
            await self._loop.go()
        except PotluckError as error:
            await self._fail(self._record.reason(error))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._record.log.exception("run failed unexpectedly")
            reason = f"unexpected {type(error).__name__}: {error}; see the coordinator's log"
            await self._fail(plugin_failure(error, self._plan.plugins) or reason)
        finally:
            self._prepared.set()
            if self._loop is not None:
                await self._loop.stop()
            await self._services.training.close()
            if self._services.spans is not None:
                self._services.spans.close()
            self.feed.close()

    async def _fail(self, reason: str) -> None:
        """End the run with a failure that did not come from the state machine."""
        if self._loop is not None:
            await self._loop.fail(reason)
        else:
            await self._end(rounds.End(rounds.RunEnding.FAILED, reason))

    async def _end(self, action: rounds.End) -> None:
        state = _STATE_AFTER[action.ending]
        try:
            if self._loop is not None:
                await self._loop.settle()
                self._services.files.let_go(self.files_in_use())
            self._over = True
            # a kill may have prevented this after the last commit
            await self._services.tidy(self.row.committed_rounds)
        except (PotluckError, OSError) as error:
            self._record.warn(f"the files of the last round were not deleted: {error}")
        run_id, in_store = self.row.run_id, self._services.in_store
        try:  # delete files before writing to the store: this frees space on a full disk
            await asyncio.to_thread(self._spool.remove)
        except (PotluckError, OSError) as error:
            self._record.warn(
                f"the folder with the run's received updates was not deleted: {error}"
            )
        attempt = await in_store(lambda store: store.current_attempt(run_id))
        if attempt is not None:
            reason = action.reason or "the run ended"
            await in_store(lambda store: store.abandon_attempt(attempt.key, reason))
        self._record.log.info("run ended", state=state.value, reason=action.reason)
        await self._record.set_state(state, action.reason)
        self.feed.publish(operator_pb2.WatchRunResponse(status=self.status()))
        self._services.observer.ended(action.ending, self.row.changed_at)
