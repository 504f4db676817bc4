"""A real run with a real store, models and spool; the test plays the hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.server.clock import now
from potluck.server.eligibility.collected_sums import open_collector
from potluck.server.hosts.attendance import Attendance
from potluck.server.live.feed import RunRecord
from potluck.server.live.run import CohortMember, Run
from potluck.server.live.run_metrics import RunObserver
from potluck.server.live.services import RunServices
from potluck.server.live.spool import Spool
from potluck.server.machine import events as rounds
from potluck.server.plan.plan import draw_up
from potluck.server.profiles.trust import Trust
from potluck.server.reduce.model_work import ModelWork
from potluck.server.reduce.server_training import TrainingProcess
from potluck.server.reduce.training_job import Workplace
from potluck.server.run.resume import resume
from potluck.server.select.select import admit
from potluck.server.store import Store
from potluck.server.store.model_files import ModelFiles
from potluck.server.store.records import NewRun

AT = datetime(2026, 5, 4, 12, tzinfo=UTC)
RUN_FILE = 'clients_per_round = 3\nrounds = 2\n[task]\nname = "digits"\nclients = 3\n'


@dataclass
class SmallRun:
    """Run `r`, and the parts that drive it step by step."""

    run: Run
    store: Store

    def handle(self, event: rounds.Event) -> list[rounds.Action]:
        """Return the state machine's actions for an event."""
        return list(self.run.machine.handle(event, now()))

    def posted(self) -> list[rounds.Event]:
        """The events that the run's parts have posted since the last call."""
        found = list[rounds.Event]()
        while not self.run.events.empty():
            found.append(self.run.events.get_nowait())
        return found

    async def begin_round(self, *clients: str) -> None:
        """Connect clients, each on a host of the same name, and select all of them."""
        run = self.run
        self.handle(rounds.Started())
        actions = self.handle(rounds.Joined(clients, {client: client for client in clients}))
        for action in actions:
            if isinstance(action, rounds.Admit):
                await admit(run, action.clients)
        run.begin_attempt()
        key = run.stored_attempt = run.key
        rows = run.roster.rows(clients).tolist()
        self.store.begin_attempt(key, rows, AT)
        members = {client: CohortMember(host=client, reason="chance") for client in clients}
        run.choose_cohort(members, ())
        self.store.set_cohort(key, [(client, client, "chance") for client in clients])
        self.handle(rounds.Selected(clients))


async def small_run(folder: Path, store: Store, run_file: str = RUN_FILE) -> SmallRun:
    """Prepare the run as a coordinator does: new, or resumed from its store and files."""
    plan, models = draw_up(run_file, source="test"), folder / "models"
    models.mkdir(exist_ok=True)

    async def in_store(call: Callable[[Store], Any]) -> Any:
        return call(store)

    async def nothing(_: object) -> None:
        return None

    async def offended(_: Iterable[str]) -> dict[str, str]:
        return {}

    files, attendance, trust = ModelFiles(models), Attendance(now), Trust(federation="f")
    if "r" not in {row.run_id for row in store.runs()}:
        store.add_run(NewRun.of("r", plan.run_file, run_file, AT, plan.measures))
    services = RunServices(
        attendance=attendance,
        files=files,
        state_directory=folder,
        in_store=in_store,
        tidy=nothing,
        note_commit=nothing,
        pretrain=nothing,
        offended=offended,
        training=TrainingProcess(Workplace(model_modules=(), data_directory=None, threads=1)),
        trust=trust,
        epsilon_over_runs=None,
        sums=open_collector(attendance, in_store, trust, lambda *_: None),
        observer=RunObserver(Instruments(MeasuredParty.COORDINATOR), "r", now),
        spans=None,
    )
    run = await resume(
        RunRecord(store.run("r"), in_store),
        plan,
        ModelWork(plan, files, None, threads=1),
        Spool(folder / "spool"),
        services,
        asyncio.Queue(),
    )
    assert run is not None
    return SmallRun(run, store)
