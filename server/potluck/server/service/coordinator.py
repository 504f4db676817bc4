"""The coordinator as a whole: its hosts, its runs, its files."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from potluck.common.disclosure import LABEL_COUNTS
from potluck.common.errors import (
    ConfigurationError,
    NotFoundError,
    PotluckError,
    RoundClosedError,
    RunError,
    StorageError,
    disk_error,
)
from potluck.common.metrics.instruments import Instruments
from potluck.common.metrics.metric_labels import MeasuredParty
from potluck.common.names import is_name
from potluck.common.net.identity import Role
from potluck.common.net.membership import load_members, load_public_key
from potluck.common.net.protocol import VERSIONS
from potluck.common.process.folder_lock import FolderLock
from potluck.common.secagg import FederationRoot
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.aggregation.audit_records import (
    BiasRecords,
    audit_run,
    check_auditable,
    why_not_audited,
)
from potluck.server.aggregation.label_audit import ClientAudit
from potluck.server.aggregation.model_files import ModelFiles
from potluck.server.aggregation.model_work import ModelWork
from potluck.server.aggregation.spool import Spool
from potluck.server.config import CoordinatorConfig
from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.offences import Offences
from potluck.server.profiles.collect import Profiling, Trust, stored_profiles
from potluck.server.rounds.events import StopRequested
from potluck.server.rounds.plan import RunPlan, draw_up
from potluck.server.rounds.pretraining import is_pretraining, pretraining_id, pretraining_run
from potluck.server.runs.announce import SETTLE_SECONDS, announce_closed
from potluck.server.runs.driver import RunDriver
from potluck.server.runs.recorded_commits import Commits
from potluck.server.runs.services import RunServices, now, utc
from potluck.server.runs.update_inbox import UpdateInbox
from potluck.server.selection import Population
from potluck.server.service.coordinator_metrics import CoordinatorMetrics
from potluck.server.service.disclosures import Disclosures, read_disclosures
from potluck.server.service.registry import Hosts
from potluck.server.service.retention import Tidying
from potluck.server.service.transfers import Transfers
from potluck.server.store import Store
from potluck.server.store.journal import LostRounds
from potluck.server.store.records import ClientRow, NewRun, RoundRow, RunRow, RunState
from potluck.server.sums.counts import SecureSums

log = structlog.get_logger()
T = TypeVar("T")

_ROUNDS_AT_ONCE = 100
"""Read from the store in one go, so that rounds under way get their turn between."""


class Coordinator:
    """Everything behind the services. Lives on the event loop; see `opened`."""

    def __init__(
        self,
        config: CoordinatorConfig,
        store: Store,
        thread: ThreadPoolExecutor,
        instruments: Instruments,
    ) -> None:
        self.config = config
        self.id = secrets.token_hex(8)
        self.attendance = Attendance(now)
        self.metrics = CoordinatorMetrics(instruments, self.attendance, config.state_directory)
        self.hosts = Hosts(
            self.attendance,
            self.metrics,
            self.in_store,
            heartbeat_seconds=config.heartbeat_seconds,
        )
        self.files = ModelFiles(_folder(config.state_directory / "models"))
        self.transfers = Transfers(config.concurrent_transfers)
        self.maximum_model_bytes = config.maximum_model_bytes
        self._store = store
        self._thread = thread
        self._trust = _trust(config)
        self.sums = SecureSums(self.attendance, self.in_store, self._trust.root)
        self.sums.observe = self.metrics.secure_phase
        self._offences = Offences(self.set_quarantine)
        self._drivers: dict[str, RunDriver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tidying = Tidying(self.files, self.in_store, self._files_in_use)
        self._commits = Commits(config.state_directory / "journal", self.in_store)
        self._looking: asyncio.Task[None] | None = None
        self._resuming = asyncio.Lock()
        self.broken: asyncio.Future[PotluckError] = asyncio.get_running_loop().create_future()
        """Done when the coordinator can't go on: the store takes no more."""

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls, config: CoordinatorConfig, instruments: Instruments | None = None
    ) -> AsyncIterator[Coordinator]:
        """A coordinator with its store open and its unfinished runs resumed."""
        instruments = instruments or Instruments(MeasuredParty.COORDINATOR)
        lock = _locked(_folder(config.state_directory))
        thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        loop = asyncio.get_running_loop()
        try:
            store = await loop.run_in_executor(thread, Store.open, config.database_url())
            coordinator = cls(config, store, thread, instruments)
            expiring = asyncio.create_task(coordinator.attendance.watch_deadlines())
            try:
                found = await asyncio.to_thread(coordinator.files.clear_leftovers)
                await coordinator._count_quarantined()
                await coordinator._resume_runs()
                await coordinator._settle_ended()
                coordinator._looking = asyncio.create_task(coordinator._look_at(found))
                yield coordinator
            finally:
                expiring.cancel()
                store.give_up()
                await coordinator._stop_driving()
                await coordinator.hosts.close()
                coordinator._commits.close()
                await loop.run_in_executor(thread, store.close)
        finally:
            thread.shutdown()
            lock.close()

    async def in_store(self, call: Callable[[Store], T]) -> T:
        """Call with the store in its thread; a call that has begun is always finished.

        Where the database is away, this waits for it. See `Store.patiently` for what that asks of
        a call.
        """
        loop = asyncio.get_running_loop()
        patiently = partial(self._store.patiently, call)
        return await asyncio.shield(loop.run_in_executor(self._thread, patiently))

    def watch_store(self, tell_away: Callable[[str], None]) -> None:
        """Be told why the database is away, and with "" that it is back."""
        loop = asyncio.get_running_loop()

        def tell(why: str) -> None:
            if why:
                log.warning("waiting for the database", reason=why)
            else:
                log.info("the database is back")
            loop.call_soon_threadsafe(tell_away, why)

        self._store.watch(tell)

    # Hosts ------------------------------------------------------------------------------------

    def welcome(self) -> coordinator_pb2.AttendResponse:
        """What a host is told after its hello."""
        welcome = coordinator_pb2.Welcome(coordinator_id=self.id, versions=VERSIONS)
        welcome.heartbeat_interval.FromNanoseconds(int(self.config.heartbeat_seconds * 1e9))
        return coordinator_pb2.AttendResponse(welcome=welcome)

    async def clients(self, *, after: str = "", limit: int | None = None) -> list[ClientRow]:
        """All clients ever met, or a page of them."""
        return await self.in_store(partial(Store.clients, after=after, limit=limit))

    # Transfers --------------------------------------------------------------------------------

    async def inbox_of(self, run_id: str, update_id: str) -> UpdateInbox:
        """Where the run under way takes an update that says it is for it. Raises RoundClosedError.

        After a restart hosts may come before the run knows where it stood: they wait for it.
        """
        driver = self._drivers.get(run_id)
        inbox = None if driver is None else await driver.inbox()
        if inbox is None:
            raise RoundClosedError(
                f"nobody waits for update '{update_id[:200]}': its run is over or unknown; drop it",
                update=update_id[:200],
            )
        return inbox

    def count_down(self, blake3: str, sent: int) -> None:
        """Bytes of a model file went out: to the account of the run that uses it."""
        for driver in self._drivers.values():
            if driver.serves(blake3):
                driver.count_down(blake3, sent)
                return

    # Runs -------------------------------------------------------------------------------------

    async def start_run(self, text: str) -> RunRow:
        """Check a run file and start the run. Raises ConfigurationError, PluginError, RunError."""
        plan = self._draw_up(text, "run file")
        run_file = plan.run_file
        if run_file.secure_aggregation and self._trust.root is None:
            raise ConfigurationError(
                "secure_aggregation needs a federation root, by which clients know one another; "
                "set federation_root and members of the coordinator (`potluck pki root` and "
                "`potluck pki member` make them)"
            )
        await asyncio.to_thread(self._work(plan).check_start)
        run_id = secrets.token_hex(4)
        run = NewRun(
            run_id=run_id,
            name=run_file.name,
            run_file=text,
            created_at=utc(),
            rounds=run_file.rounds,
            count=run_file.count,
            seed=run_file.seed,
            task=run_file.task.name,
            selector=run_file.selector.name,
            strategy=run_file.strategy.name,
        )
        await self.in_store(lambda store: store.add_run(run))
        row = await self.in_store(lambda store: store.run(run_id))
        log.info("run started", run=run_id, name=run.name, task=run.task, rounds=run.rounds)
        self._begin_driving(row, plan)
        return row

    async def stop_run(self, run_id: str) -> RunRow:
        """Stop a run; the last committed model stays. Raises NotFoundError, RunError."""
        row = await self.in_store(lambda store: store.run(run_id))
        driver, task = self._drivers.get(row.run_id), self._tasks.get(row.run_id)
        if driver is None or task is None:
            raise RunError(f"run {row.run_id} is not under way, it is {row.state}", run=row.run_id)
        for each in (driver, self._drivers.get(pretraining_id(row.run_id))):
            if each is not None:
                each.post(StopRequested())
        await asyncio.wait([task])
        return await self.in_store(lambda store: store.run(row.run_id))

    async def resume_run(self, run_id: str) -> RunRow:
        """Go on with a stopped or failed run after its last committed round.

        Raises NotFoundError, RunError where it is under way or finished, ConfigurationError or
        PluginError where its run file can't be used any more.
        """
        async with self._resuming:  # two calls at once must not drive one run twice
            row = await self.run(run_id)
            if row.state not in (RunState.STOPPED, RunState.FAILED):
                raise RunError(
                    f"run {row.run_id} is {row.state}; only a stopped or failed run can be resumed",
                    run=row.run_id,
                    state=row.state,
                )
            if row.run_id in self._tasks:  # its end is stored, and about to be all
                await asyncio.wait([self._tasks[row.run_id]])
            plan = self._draw_up(row.run_file, f"run file of {row.run_id}")
            await self._commits.accept(row)
            # Somebody has put something right: all get another chance.
            await self.in_store(lambda store: store.let_in(row.run_id))
            await self.in_store(
                lambda store: store.set_run_state(row.run_id, RunState.WAITING, "", utc())
            )
            row = await self.run(row.run_id)
            log.info("run resumed", run=row.run_id, committed=row.committed_rounds)
            self._begin_driving(row, plan)
            return row

    async def runs(self, *, before: int | None = None, limit: int | None = None) -> list[RunRow]:
        """All runs, newest first, those included that only pre-train for others; or a page."""
        return await self.in_store(partial(Store.runs, before=before, limit=limit))

    async def set_quarantine(self, client_id: str, reason: str | None) -> None:
        """Put a client into quarantine, or readmit it where there is no reason.

        Counts from the next selection of each run on. Raises ConfigurationError for what is no
        client id, NotFoundError where a client to be readmitted is not in quarantine.
        """
        if not is_name(client_id):
            raise ConfigurationError(
                f"{client_id[:80]!r} is no client id; `potluck clients` lists them",
                client=client_id[:80],
            )
        if reason is None:
            await self.in_store(lambda store: store.readmit(client_id))
        else:
            await self.in_store(lambda store: store.quarantine(client_id, reason, utc()))
        log.warning("quarantine", client=client_id, quarantined=reason is not None, reason=reason)
        await self._count_quarantined()
        for driver in list(self._drivers.values()):
            await driver.quarantine_changed()

    async def _count_quarantined(self) -> None:
        self.metrics.quarantined(len(await self.in_store(lambda store: store.quarantined())))

    async def profiles(self, run_id: str) -> Population:
        """What a run's clients have disclosed. Raises NotFoundError."""
        row = await self.run(run_id)
        plan = self._draw_up(row.run_file, f"run file of {row.run_id}")
        return (await self._stored_profiles(row, plan)).population()

    async def audit_labels(self, run_id: str) -> tuple[Population, list[ClientAudit]]:
        """What a run's clients claimed of their labels, held against how their updates moved the
        output bias. Raises NotFoundError, RunError where the run has nothing to audit."""
        row = await self.run(run_id)
        plan = self._draw_up(row.run_file, f"run file of {row.run_id}")
        check_auditable(plan)
        profiling = await self._stored_profiles(row, plan)
        population, rates = profiling.population(), profiling.noise_rates(LABEL_COUNTS)
        rounds = [each async for each in self.committed_rounds(row.run_id)]
        records = self._bias_records(row.run_id)
        audits = await asyncio.to_thread(audit_run, plan, population, rates, rounds, records)
        return population, audits

    async def audit_disclosures(self, run_id: str) -> Disclosures:
        """What left a run's clients, as far as the coordinator saw it. Raises NotFoundError."""
        row = await self.run(run_id)
        return await self.in_store(
            partial(read_disclosures, run_id=row.run_id, independent=self._trust.independent)
        )

    async def _stored_profiles(self, row: RunRow, plan: RunPlan) -> Profiling:
        return await stored_profiles(row.run_id, plan, self.attendance, self.in_store, self._trust)

    def _bias_records(self, run_id: str) -> BiasRecords:
        return BiasRecords(self.config.state_directory / "bias-updates" / run_id)

    async def run(self, run_id: str) -> RunRow:
        """A run by id, a beginning of it, or its name; see `Store.run`. Raises NotFoundError."""
        return await self.in_store(lambda store: store.run(run_id))

    def left_out_of(self, client_id: str) -> dict[str, str]:
        """Runs under way that a client can't take part in, and why."""
        whys = {run_id: each.why_left_out(client_id) for run_id, each in self._drivers.items()}
        return {run_id: why for run_id, why in whys.items() if why}

    async def committed_rounds(self, run_id: str, *, after: int = 0) -> AsyncIterator[RoundRow]:
        """A run's rounds with numbers above `after`, in order, as many as there are by then."""
        while True:
            page = await self.in_store(
                partial(Store.rounds, run_id=run_id, after=after, limit=_ROUNDS_AT_ONCE)
            )
            for row in page:
                yield row
            if len(page) < _ROUNDS_AT_ONCE:
                return
            after = page[-1].key.round

    def runs_under_way(self) -> list[RunRow]:
        """Runs that are waiting or running, oldest first; not those that pre-train for others."""
        drivers = self._drivers.items()
        rows = [driver.row for run_id, driver in drivers if not is_pretraining(run_id)]
        return sorted(rows, key=lambda row: row.number)

    def driver(self, run_id: str) -> RunDriver | None:
        """The run, if it is under way."""
        return self._drivers.get(run_id)

    async def model_of(self, run_id: str, round_number: int) -> tuple[RunRow, int, str]:
        """A run, the number of its round and the digest of that round's model.

        Round 0 means the last one; it is answered by 0 where none is committed yet, with the model
        before round 1. Raises NotFoundError.
        """
        row = await self.run(run_id)
        if round_number == 0:
            round_number, blake3 = row.committed_rounds, row.model_blake3
        else:
            committed = await self.in_store(lambda store: store.round(row.run_id, round_number))
            blake3 = None if committed is None else committed.model_blake3
        if blake3 is None:
            which = f"round {round_number}" if round_number else "any round"
            raise NotFoundError(f"run {row.run_id} has no model of {which} yet", run=row.run_id)
        try:
            self.files.existing(blake3)
        except NotFoundError:
            raise NotFoundError(
                f"the model of round {round_number} of run {row.run_id} is not kept any more; "
                "[retention] in a run file says which are",
                run=row.run_id,
            ) from None
        return row, round_number, blake3

    # Driving ----------------------------------------------------------------------------------

    async def _resume_runs(self) -> None:
        lost = await self._commits.compare()
        for loss in lost.values():
            await self._tell(loss)
        for row in await self.in_store(lambda store: store.unfinished_runs()):
            if is_pretraining(row.run_id):
                continue  # the run it is for will go on with it
            try:
                plan = self._draw_up(row.run_file, "run file")
            except ConfigurationError as error:
                await self._fail(row, error.message)
                continue
            log.info("run resumed", run=row.run_id, committed=row.committed_rounds)
            self._begin_driving(row, plan)

    async def _settle_ended(self) -> None:
        """Tell clients how runs ended that did so when the coordinator went down: it may not have
        reached all of them."""
        since = utc() - timedelta(seconds=SETTLE_SECONDS)
        for run_id in await self.in_store(lambda store: store.runs_ended_since(since)):
            try:
                last = await self.in_store(partial(Store.last_round, run_id=run_id))
            except StorageError as error:  # a damaged row of a run that is over stops nothing
                log.warning("clients do not hear how a run ended", run=run_id, reason=str(error))
                continue
            if last is not None:
                announce_closed(self.attendance, last)

    async def _tell(self, loss: LostRounds) -> None:
        """Say that the database lost rounds of a run, which goes on only when a person says so."""
        reason = loss.explain(self._store.name)
        log.error("committed rounds were lost", run=loss.run_id, reason=reason)
        if loss.committed is not None:
            await self.in_store(
                lambda store: store.set_run_state(loss.run_id, RunState.FAILED, reason, utc())
            )

    async def _look_at(self, found: set[str]) -> None:
        """Delete what earlier coordinators left, once the runs under way know what they use."""
        for driver in list(self._drivers.values()):
            await driver.inbox()
        try:
            await self._tidying.look_at(found - self._commits.spared)
        except (PotluckError, OSError) as error:
            log.warning("model files of earlier rounds were not tidied up", reason=str(error))

    def _files_in_use(self) -> set[str]:
        return set[str]().union(*(driver.files_in_use() for driver in self._drivers.values()))

    async def _fail(self, row: RunRow, reason: str) -> None:
        log.error("run can't be resumed", run=row.run_id, reason=reason)
        await self.in_store(
            lambda store: store.set_run_state(row.run_id, RunState.FAILED, reason, utc())
        )

    def _work(self, plan: RunPlan, records: BiasRecords | None = None) -> ModelWork:
        return ModelWork(plan, self.files, self.config.data_directory, self.config.threads, records)

    def _begin_driving(self, row: RunRow, plan: RunPlan) -> None:
        records = None if why_not_audited(plan) else self._bias_records(row.run_id)
        work = self._work(plan, records)
        spool = Spool(self.config.state_directory / "spool" / row.run_id)
        services = RunServices(
            attendance=self.attendance,
            files=self.files,
            in_store=self.in_store,
            tidy=partial(self._tidying.after_commit, row.run_id, plan.run_file.retention),
            note_commit=self._commits.note,
            pretrain=partial(self._pretrain, row.run_id, plan),
            offended=self._offences.add,
            trust=self._trust,
            sums=self.sums,
            observer=self.metrics.observer(row.run_id),
        )
        services.observer.began(row)
        self._tidying.begin(row.run_id, row.committed_rounds)
        driver = RunDriver(row, plan, work, spool, services)
        self._drivers[row.run_id] = driver
        self.metrics.under_way(self._drivers)
        task = asyncio.create_task(driver.drive(), name=f"run {row.run_id}")
        self._tasks[row.run_id] = task
        task.add_done_callback(partial(self._forget, row.run_id))

    async def _pretrain(self, run_id: str, plan: RunPlan, initial: str) -> str | None:
        """Pre-train for a run, from the model `initial`; the digest of the model that comes of it.

        None where the operator stops it. Raises RunError where it fails.
        """
        clients = len(self.attendance.clients)
        wanted = pretraining_run(run_id, plan.run_file, clients=clients, at=utc())
        row: RunRow = await self.in_store(partial(_find_or_add, run=wanted, initial=initial))
        if row.state is not RunState.FINISHED:
            self._begin_driving(row, self._draw_up(row.run_file, "pre-training"))
            await asyncio.wait([self._tasks[row.run_id]])
            row = await self.run(row.run_id)
        if row.state is RunState.FAILED:
            raise RunError(f"pre-training failed: {row.reason}", run=run_id)
        return row.model_blake3 if row.state is RunState.FINISHED else None

    def _forget(self, run_id: str, task: asyncio.Task[None]) -> None:
        driver = self._drivers.pop(run_id, None)
        if driver is not None:
            self.files.let_go(driver.files_in_use())
        self._tasks.pop(run_id, None)
        self.metrics.under_way(self._drivers)
        error = None if task.cancelled() else task.exception()
        if error is None or self.broken.done():
            return
        # Not even the run's end could be recorded: a restart resumes it.
        if isinstance(error, OSError):
            error = disk_error(error, self.config.state_directory)
        cause = error.message if isinstance(error, PotluckError) else repr(error)
        again = "then start the coordinator again: its runs go on by themselves"
        self.broken.set_result(
            StorageError(f"run {run_id} can't be ended: {cause}; {again}", run=run_id)
        )

    def _draw_up(self, text: str, source: str) -> RunPlan:
        return draw_up(text, source=source, model_modules=self.config.model_modules)

    async def _stop_driving(self) -> None:
        tasks = list[asyncio.Task[None]](self._tasks.values())
        if self._looking is not None:
            tasks.append(self._looking)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _trust(config: CoordinatorConfig) -> Trust:
    """Whose signatures count. Raises ConfigurationError, IdentityError."""
    federation = config.tls.load(Role.COORDINATOR).identity.federation
    if config.federation_root is None and config.members is None:
        return Trust(federation=federation, members=None)
    if config.federation_root is None or config.members is None:
        raise ConfigurationError(
            "`federation_root` and `members` go together; set both, or neither where the "
            "federation has no root"
        )
    members = load_members(config.members, config.federation_root, federation=federation)
    root = FederationRoot(federation, load_public_key(config.federation_root))
    return Trust(
        federation=federation, members=members, root=root, independent=config.independent_root
    )


def _find_or_add(store: Store, *, run: NewRun, initial: str) -> RunRow:
    """The row of a pre-training run, made if it is missing, ready to go on if it had ended."""
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


def _locked(path: Path) -> FolderLock:
    """The store has a lock of its own, but need not lie in the state directory."""
    return FolderLock(
        path,
        holder="coordinator",
        remedy="stop that one, or give each its own state_directory and database",
    )


def _folder(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"can't use {path} as a state directory: {error.strerror}; choose another "
            "`state_directory`, or change its permissions",
            path=path,
        ) from error
    return path
