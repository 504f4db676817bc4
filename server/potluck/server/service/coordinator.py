"""The coordinator: opens its parts, and resumes, starts and ends runs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from functools import partial
from typing import cast

import structlog

from potluck.common.errors import ConfigurationError, RunError, StorageError
from potluck.common.monitoring.instruments import Instruments
from potluck.common.names import is_name
from potluck.common.net.membership import Members
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.common.settings import plugins
from potluck.common.tracing import open_tracer
from potluck.server.clock import now, utc
from potluck.server.config import CoordinatorConfig
from potluck.server.file_store import FileStore
from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.gather import SETTLE_SECONDS, announce_closed
from potluck.server.hosts.host_registry import HostRegistry
from potluck.server.hosts.offences import Offences
from potluck.server.plan.plan import RunPlan, draw_up
from potluck.server.plan.pretraining import is_pretraining
from potluck.server.profiles.trust import load_trust
from potluck.server.service.archive import Archive
from potluck.server.service.coordinator_metrics import CoordinatorMetrics
from potluck.server.service.restore import check_not_interrupted
from potluck.server.service.runs_under_way import RunsUnderWay
from potluck.server.service.state_folders import locked_state, models_folder
from potluck.server.service.transfers import Transfers
from potluck.server.sinks.sink_job import sink_jobs
from potluck.server.sinks.sink_watch import Sinks
from potluck.server.store import Store
from potluck.server.store.model_files import ModelFiles
from potluck.server.store.records import NewRun, RunRow, RunState
from potluck.server.store.store_thread import StoreThread

log = structlog.get_logger()


class Coordinator:
    """The parts of a coordinator that its services use. Used on the event loop; create it with
    `opened`."""

    def __init__(
        self, config: CoordinatorConfig, store: StoreThread, instruments: Instruments
    ) -> None:
        self.config = config
        self.store = store
        self.id = secrets.token_hex(8)
        self.attendance = Attendance(now)
        self.metrics = CoordinatorMetrics(instruments, self.attendance, config.state_directory)
        self.hosts = HostRegistry(
            self.attendance, instruments, store.call, heartbeat_seconds=config.heartbeat_seconds
        )
        self.files = ModelFiles(models_folder(config))
        self.stored = self._make_stored(instruments)
        self.transfers = Transfers(config.concurrent_transfers)
        self.trust = load_trust(config)
        if self.trust.membership is not None:
            self._spread(self.trust.membership)
        self.metrics.watch_members(self._members_expire)
        self.archive = Archive(config, store.ask, self.files, self.attendance, self.trust)
        self.tracer = open_tracer(config.tracing, "potluck-coordinator", config.listen)
        self.runs = RunsUnderWay(
            config,
            store.call,
            self.attendance,
            self.files,
            self.metrics,
            self.trust,
            Offences(self.set_quarantine).add,
            self.tracer,
        )
        jobs = sink_jobs(
            config.sinks, database=config.database_url(), state_directory=config.state_directory
        )
        self._sinks = Sinks(jobs, instruments)
        self.runs.changed = self._sinks.tell
        self._resuming = asyncio.Lock()
        self._excluding: asyncio.Task[None] | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls, config: CoordinatorConfig, instruments: Instruments
    ) -> AsyncIterator[Coordinator]:
        """Open a coordinator: open its store and resume its unfinished runs. Close it at the end of
        the block."""
        with locked_state(config):
            check_not_interrupted(config.state_directory)
            async with StoreThread.opened(config.database_url()) as store:
                coordinator = cls(config, store, instruments)
                background = [asyncio.create_task(coordinator.attendance.watch_deadlines())]
                if coordinator.trust.membership is not None:
                    watching = coordinator.trust.membership.watch()
                    background.append(asyncio.create_task(watching))
                try:
                    found = await asyncio.to_thread(coordinator.files.clear_leftovers)
                    await coordinator._count_quarantined()
                    await coordinator._resume_runs()
                    await coordinator._announce_ended()
                    background.append(asyncio.create_task(coordinator.runs.tidy_up(found)))
                    coordinator._sinks.begin()
                    if coordinator.stored is not None:
                        sweeping = coordinator.stored.sweep_for_ever()
                        background.append(asyncio.create_task(sweeping))
                    yield coordinator
                finally:
                    for task in background:
                        task.cancel()
                    store.give_up()
                    await coordinator.runs.close()
                    await coordinator._sinks.close()
                    if coordinator.tracer is not None:
                        await asyncio.to_thread(coordinator.tracer.close)
                    await asyncio.wait(background)
                    if coordinator.stored is not None:
                        await coordinator.stored.close()
                    await coordinator.hosts.close()

    def _make_stored(self, instruments: Instruments) -> FileStore | None:
        """Return the object store; None if hosts exchange files only with the coordinator."""
        if not self.config.files.store:
            return None
        maker = plugins.integration("object-store")
        return cast(FileStore, maker(self.config.files, self.files, instruments))

    def _spread(self, membership: MembershipInForce) -> None:
        """Send hosts the current member list, and every newer one."""

        def spread(_: Members) -> None:
            self.attendance.spread(membership.epoch, membership.document)
            self._excluding = asyncio.create_task(self.runs.exclusion_changed())

        membership.listen(spread)
        self.attendance.spread(membership.epoch, membership.document)

    def _members_expire(self) -> datetime | None:
        """Return the time when the first member record expires; None without records."""
        members = self.trust.members
        records = [] if members is None else members.records.values()
        return min((record.not_after for record in records), default=None)

    # Runs -------------------------------------------------------------------------------------

    async def start_run(self, text: str) -> RunRow:
        """Check a run file and start the run. Raises ConfigurationError, PluginError, RunError."""
        plan = self._draw_up(text, "run file")
        if plan.run_file.secure_aggregation:
            self._check_members(plan.rules.hosts)
        await self.runs.check_start(plan)
        run = NewRun.of(secrets.token_hex(4), plan.run_file, text, utc(), plan.measures)
        await self.store.call(lambda store: store.add_run(run))
        row = await self._row(run.run_id)
        log.info("run started", run=row.run_id, name=run.name, task=run.task, rounds=run.rounds)
        self.runs.begin(row, plan)
        return row

    def _check_members(self, least: int) -> None:
        """Raise ConfigurationError unless valid members of the federation are on at least `least`
        hosts."""
        members = self.trust.members
        if members is None:
            raise ConfigurationError(
                "secure_aggregation needs a federation root, with which clients verify each "
                "other's keys; set `federation_root` and `members` in the coordinator's "
                "configuration (create the files with `potluck pki root` and `potluck pki member`)"
            )
        valid = [host for each, host in members.hosts.items() if self.trust.is_member(each)]
        there = len(set(valid))
        if there < least:
            raise ConfigurationError(
                f"secure_aggregation needs clients on {least} hosts, and the federation's "
                f"{len(valid)} members are on {there}; add members on other hosts with "
                "`potluck pki member`, or remove secure_aggregation",
                hosts=there,
                needed=least,
            )

    async def stop_run(self, run_id: str) -> RunRow:
        """Stop a run; its last committed model is kept. Raises NotFoundError, RunError."""
        row = await self.archive.run(run_id)
        await self.runs.stop(row)
        return await self._row(row.run_id)

    async def resume_run(self, run_id: str) -> RunRow:
        """Resume a stopped or failed run after its last committed round.

        Raises NotFoundError; RunError if the run is under way or finished; ConfigurationError or
        PluginError if its run file is no longer valid.
        """
        async with self._resuming:  # simultaneous calls must not drive a run twice
            row = await self.archive.run(run_id)
            if row.state not in (RunState.STOPPED, RunState.FAILED):
                raise RunError(
                    f"run {row.run_id} is {row.state}; only a stopped or failed run can be resumed",
                    run=row.run_id,
                    state=row.state,
                )
            await self.runs.ended(row.run_id)
            plan = self._draw_up(row.run_file, f"run file of {row.run_id}")
            await self.runs.commits.accept(row)
            # The operator may have fixed a problem, so all clients may take part again.
            await self.store.call(lambda store: store.let_in(row.run_id))
            await self._set_state(row.run_id, RunState.WAITING, "")
            row = await self._row(row.run_id)
            log.info("run resumed", run=row.run_id, committed=row.committed_rounds)
            self.runs.begin(row, plan)
            return row

    async def delete_run(self, run_id: str) -> RunRow:
        """Delete an ended run; return its row. Raises NotFoundError, RunError."""
        async with self._resuming:  # the run must not be resumed meanwhile
            row = await self.archive.run(run_id)
            if row.state in (RunState.WAITING, RunState.RUNNING):
                raise RunError(
                    f"run {row.run_id} is {row.state}; stop it first: `potluck stop {row.run_id}`",
                    run=row.run_id,
                    state=row.state,
                )
            await self.runs.ended(row.run_id)
            await self.runs.delete(row.run_id)
            log.info("run deleted", run=row.run_id, name=row.name, rounds=row.committed_rounds)
            return row

    async def _row(self, run_id: str) -> RunRow:
        """Return the row of an existing run. Wait if the database is not available."""
        return await self.store.call(lambda store: store.run(run_id))

    def _draw_up(self, text: str, source: str) -> RunPlan:
        return draw_up(text, source=source, model_modules=self.config.model_modules)

    async def _set_state(self, run_id: str, state: RunState, reason: str) -> None:
        await self.store.call(lambda store: store.set_run_state(run_id, state, reason, utc()))

    # Clients ----------------------------------------------------------------------------------

    async def set_quarantine(self, client_id: str, reason: str | None) -> None:
        """Put a client into quarantine; readmit it if `reason` is None.

        Applies from the next selection of each run. Raises ConfigurationError if `client_id` is not
        a valid client id, NotFoundError if a client to readmit is not in quarantine.
        """
        if not is_name(client_id):
            raise ConfigurationError(
                f"{client_id[:80]!r} is not a client id; `potluck clients` lists them",
                client=client_id[:80],
            )
        if reason is None:
            await self.store.call(lambda store: store.readmit(client_id))
        else:
            await self.store.call(lambda store: store.quarantine(client_id, reason, utc()))
        log.warning("quarantine", client=client_id, quarantined=reason is not None, reason=reason)
        await self._count_quarantined()
        await self.runs.exclusion_changed()

    async def _count_quarantined(self) -> None:
        quarantined = await self.store.call(lambda store: store.quarantined())
        self.metrics.quarantined(len(quarantined))

    # At the start -----------------------------------------------------------------------------

    async def _resume_runs(self) -> None:
        """Resume unfinished runs. A run is not resumed if the database has lost rounds of it."""
        for loss in (await self.runs.commits.compare()).values():
            reason = loss.explain(self.store.name)
            log.error("committed rounds were lost", run=loss.run_id, reason=reason)
            if loss.committed is not None:
                await self._set_state(loss.run_id, RunState.FAILED, reason)
                self.metrics.failed_at_start(loss.run_id, utc())
            else:
                self.archive.lost[loss.run_id] = reason
        for row in await self.store.call(lambda store: store.unfinished_runs()):
            if is_pretraining(row.run_id):
                continue  # the main run will resume this pre-training run
            try:
                plan = self._draw_up(row.run_file, "run file")
            except ConfigurationError as error:
                log.error("run can't be resumed", run=row.run_id, reason=error.message)
                await self._set_state(row.run_id, RunState.FAILED, error.message)
                self.metrics.failed_at_start(row.run_id, utc())
                continue
            log.info("run resumed", run=row.run_id, committed=row.committed_rounds)
            self.runs.begin(row, plan)

    async def _announce_ended(self) -> None:
        """Inform clients about recently ended runs.

        The coordinator may have ended before it could send the message, or before it reached all
        clients.
        """
        since = utc() - timedelta(seconds=SETTLE_SECONDS)
        for run_id in await self.store.call(lambda store: store.runs_ended_since(since)):
            try:
                last = await self.store.call(partial(Store.last_round, run_id=run_id))
            except StorageError as error:  # a damaged row of an ended run is not fatal
                log.warning("clients not informed of a run's end", run=run_id, reason=str(error))
                continue
            if last is not None:
                announce_closed(self.attendance, last)
