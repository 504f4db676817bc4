"""The current runs: drives them, knows which files they use, and ends them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import structlog

from potluck.common.disclosure import Weighting
from potluck.common.errors import (
    NotFoundError,
    PotluckError,
    RoundClosedError,
    RunError,
    StorageError,
    disk_error,
)
from potluck.common.tracing import Tracer
from potluck.server.clock import utc
from potluck.server.config import CoordinatorConfig
from potluck.server.eligibility.collected_sums import open_collector
from potluck.server.hosts.attendance import Attendance
from potluck.server.live.run_spans import RunSpans
from potluck.server.live.services import RunServices
from potluck.server.live.spool import Spool
from potluck.server.machine.events import StopRequested
from potluck.server.plan.plan import RunPlan, draw_up
from potluck.server.plan.pretraining import is_pretraining, pretraining_id, pretraining_run
from potluck.server.plan.trace_clock import trace_clock
from potluck.server.profiles.trust import Trust
from potluck.server.reduce.audit.audit_records import why_not_audited
from potluck.server.reduce.model_work import ModelWork
from potluck.server.reduce.server_training import TrainingProcess
from potluck.server.reduce.training_job import Workplace, public_inputs, public_labels
from potluck.server.run.driver import RunDriver
from potluck.server.service.archive import bias_records
from potluck.server.service.coordinator_metrics import CoordinatorMetrics
from potluck.server.service.retention import Tidying
from potluck.server.store import RoundRow, Store
from potluck.server.store.model_files import ModelFiles
from potluck.server.store.recorded_commits import RECORDS, Commits
from potluck.server.store.records import NewRun, RunRow, RunState
from potluck.server.store.store_thread import InStore
from potluck.server.updates.update_inbox import UpdateInbox

log = structlog.get_logger()


class RunsUnderWay:
    """The current runs by id, including pre-training runs. Used on the event loop."""

    def __init__(
        self,
        config: CoordinatorConfig,
        in_store: InStore,
        attendance: Attendance,
        files: ModelFiles,
        metrics: CoordinatorMetrics,
        trust: Trust,
        offended: Callable[[Iterable[str]], Awaitable[dict[str, str]]],
        tracer: Tracer | None = None,
    ) -> None:
        """offended: `Offences.add`, which counts offences of clients and may quarantine them.
        tracer: receives the spans of runs."""
        self._tracer = tracer
        self._config = config
        self._in_store = in_store
        self._attendance = attendance
        self._files = files
        self._metrics = metrics
        self._trust = trust
        self._offended = offended
        self._drivers: dict[str, RunDriver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[str] = set()
        self._tidying = Tidying(files, in_store, self._files_in_use)
        self.commits = Commits(config.state_directory, in_store)
        self.sums = open_collector(attendance, in_store, trust, metrics.secure_phase)
        metrics.watch_runs(self._away_hosts)
        self.broken: asyncio.Future[PotluckError] = asyncio.get_running_loop().create_future()
        """Future that gets an error if the store has failed, so that the coordinator can't
        continue."""
        self.changed: Callable[[], None] = lambda: None
        """Function called when a run has started or ended, or a round was committed."""

    # Beginning and ending ---------------------------------------------------------------------

    async def check_start(self, plan: RunPlan) -> None:
        """Raise ConfigurationError or PluginError if a run can't start."""
        await asyncio.to_thread(self._work(plan).check_start)
        await asyncio.to_thread(
            trace_clock, plan.run_file.virtual_clock, self._config.data_directory
        )
        if plan.strategy.trains:
            await asyncio.to_thread(public_inputs, plan, self._config.data_directory)
            await asyncio.to_thread(public_labels, plan, self._config.data_directory)

    def begin(self, row: RunRow, plan: RunPlan) -> None:
        """Drive a run from its stored state."""
        run_id = row.run_id
        observer = self._metrics.observer(run_id)
        services = RunServices(
            attendance=self._attendance,
            files=self._files,
            state_directory=self._config.state_directory,
            epsilon_over_runs=self._config.epsilon_over_runs,
            in_store=self._in_store,
            tidy=partial(self._tidying.after_commit, run_id, plan.run_file.kept_models),
            note_commit=self._note_commit,
            pretrain=partial(self._pretrain, run_id, plan),
            offended=self._offended,
            training=TrainingProcess(self._workplace()),
            trust=self._trust,
            sums=self.sums,
            observer=observer,
            spans=None if self._tracer is None else _spans(self._tracer, row, plan),
        )
        observer.began(row)
        self._tidying.begin(run_id, row.committed_rounds)
        spool = Spool(self._config.state_directory / "spool" / run_id)
        driver = RunDriver(row, plan, self._work(plan, audited_as=run_id), spool, services)
        self._drivers[run_id] = driver
        self._metrics.under_way(self._drivers)
        self._tasks[run_id] = asyncio.create_task(driver.drive(), name=f"run {run_id}")
        self._tasks[run_id].add_done_callback(partial(self._forget, run_id))
        self.changed()

    async def _note_commit(self, row: RoundRow) -> None:
        self.changed()
        await self.commits.note(row)

    async def stop(self, row: RunRow) -> None:
        """Stop a run, and return when it has ended. Raises RunError if it is not running."""
        task = self._tasks.get(row.run_id)
        if task is None:
            raise RunError(f"run {row.run_id} is not in progress, but {row.state}", run=row.run_id)
        self._stopping.add(row.run_id)  # so that its pre-training does not start later
        for run_id in (row.run_id, pretraining_id(row.run_id)):
            if run_id in self._drivers:
                self._drivers[run_id].post(StopRequested())
        await asyncio.wait([task])

    async def ended(self, run_id: str) -> None:
        """Wait until the driver of a run has finished, which may be after the run's end was
        stored."""
        if run_id in self._tasks:
            await asyncio.wait([self._tasks[run_id]])

    async def delete(self, run_id: str) -> None:
        """Delete an ended run, its pre-training run, and the files that no other run needs.

        Raises StorageError.
        """
        run_ids = (run_id, pretraining_id(run_id))
        await self.commits.forget(*run_ids)
        files: set[str] = await self._in_store(lambda store: store.delete_runs(run_ids))
        for each in run_ids:
            for folder in ("spool", "bias-updates", RECORDS):
                path = self._config.state_directory / folder / each
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        await self._tidying.look_at(files)

    async def close(self) -> None:
        """Stop driving all runs without ending them; the next coordinator resumes them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.commits.close()

    def _work(self, plan: RunPlan, *, audited_as: str = "") -> ModelWork:
        config = self._config
        audited = audited_as and not why_not_audited(plan)
        records = bias_records(config, audited_as) if audited else None
        return ModelWork(plan, self._files, config.data_directory, config.threads, records)

    def _workplace(self) -> Workplace:
        config = self._config
        return Workplace(
            model_modules=config.model_modules,
            data_directory=config.data_directory,
            threads=config.threads,
        )

    async def _pretrain(self, run_id: str, plan: RunPlan, initial: str) -> str | None:
        """Run the pre-training for a run, from the model `initial`; return the digest of the
        resulting model.

        Returns None if an operator stops the pre-training. Raises RunError if the pre-training
        fails.
        """
        clients = len(self._attendance.clients)
        wanted = pretraining_run(run_id, plan.run_file, clients=clients, at=utc())
        row: RunRow = await self._in_store(partial(_find_or_add, run=wanted, initial=initial))
        if row.state is not RunState.FINISHED and run_id not in self._stopping:
            modules = self._config.model_modules
            self.begin(row, draw_up(row.run_file, source="pre-training", model_modules=modules))
            await asyncio.wait([self._tasks[row.run_id]])
            row = await self._in_store(lambda store: store.run(wanted.run_id))
        if row.state is RunState.FAILED:
            raise RunError(f"pre-training failed: {row.reason}", run=run_id)
        return row.model_blake3 if row.state is RunState.FINISHED else None

    def _forget(self, run_id: str, task: asyncio.Task[None]) -> None:
        self._files.let_go(self._drivers.pop(run_id).files_in_use())
        del self._tasks[run_id]
        self._stopping.discard(run_id)
        self._metrics.under_way(self._drivers)
        self.changed()
        error = None if task.cancelled() else task.exception()
        if error is None or self.broken.done():
            return
        # The run's end could not be stored either; a restart resumes the run.
        if isinstance(error, OSError):
            error = disk_error(error, self._config.state_directory)
        cause = error.message if isinstance(error, PotluckError) else repr(error)
        again = "then start the coordinator again: the runs continue automatically"
        self.broken.set_result(
            StorageError(f"run {run_id} can't be ended: {cause}; {again}", run=run_id)
        )

    # Asking about them ------------------------------------------------------------------------

    def driver(self, run_id: str) -> RunDriver | None:
        """Return the driver of a run; None if it is not running."""
        return self._drivers.get(run_id)

    async def inbox_of(self, run_id: str, update_id: str) -> UpdateInbox:
        """Return the inbox of the run to which an update belongs. Raises RoundClosedError.

        After a restart, hosts may connect before the run has loaded its state; this call then
        waits.
        """
        driver = self._drivers.get(run_id)
        inbox = None if driver is None else await driver.inbox()
        if inbox is None:
            raise RoundClosedError(
                f"update '{update_id[:200]}' is not expected: its run has ended or is unknown; "
                "delete the update",
                update=update_id[:200],
            )
        return inbox

    def rows(self) -> list[RunRow]:
        """Return waiting and running runs, oldest first, without pre-training runs."""
        drivers = self._drivers.items()
        rows = [driver.row for run_id, driver in drivers if not is_pretraining(run_id)]
        return sorted(rows, key=lambda row: row.number)

    def _away_hosts(self) -> dict[str, list[str]]:
        """Return the disconnected hosts that each run waits for; thread-safe."""
        return {run_id: driver.away_hosts() for run_id, driver in list(self._drivers.items())}

    def left_out_of(self, client_id: str) -> dict[str, str]:
        """Return the runs in which a client can't take part, with the reasons."""
        whys = {run_id: each.why_left_out(client_id) for run_id, each in self._drivers.items()}
        return {run_id: why for run_id, why in whys.items() if why}

    def count_down(self, blake3: str, sent: int) -> None:
        """Count bytes of a model file that a host received, in the statistics of the run that uses
        the file."""
        if not sent:
            return
        for driver in self._drivers.values():
            if blake3 in driver.files_in_use():
                driver.count_down(blake3, sent)
                return

    async def exclusion_changed(self) -> None:
        """Notify all runs that the set of clients in quarantine, or of members, has changed."""
        for driver in list(self._drivers.values()):
            await driver.exclusion_changed()

    # Their files ------------------------------------------------------------------------------

    async def tidy_up(self, found: set[str]) -> None:
        """Delete unneeded files that earlier processes left, after the runs have loaded their
        state."""
        for driver in list(self._drivers.values()):
            await driver.inbox()
        try:
            await self._tidying.look_at(found)
        except (PotluckError, OSError) as error:
            log.warning("model files of earlier rounds were not deleted", reason=str(error))

    def _files_in_use(self) -> set[str]:
        in_use = (driver.files_in_use() for driver in self._drivers.values())
        return self.commits.spared.union(*in_use)


def _spans(tracer: Tracer, row: RunRow, plan: RunPlan) -> RunSpans:
    """Create the spans of a run.

    A client's training time reveals its number of samples. So traces contain this time only if the
    coordinator gets the exact number anyway.
    """
    exact = plan.run_file.weighting is Weighting.EXACT
    return RunSpans(tracer, row, alike=plan.run_file.secure_aggregation or not exact)


def _find_or_add(store: Store, *, run: NewRun, initial: str) -> RunRow:
    """Return the row of a pre-training run. Add it if it is missing; reset it if it was stopped or
    failed."""
    try:
        row = store.run(run.run_id)
    except NotFoundError:
        store.add_run(run)
        row = store.run(run.run_id)
    if row.model_blake3 is None:
        store.set_initial_model(run.run_id, initial, utc())
    if row.state in (RunState.STOPPED, RunState.FAILED):
        store.set_run_state(run.run_id, RunState.WAITING, "", utc())
    return store.run(run.run_id)
