"""Stops, resumes and disconnections while the coordinator writes to its store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from support.federation import until
from support.sum_federation import Members, SumFederation, host_of, sum_federation

from potluck.rpc.v1 import operator_pb2
from potluck.server.hosts.attendance import HostSession
from potluck.server.machine.events import StopRequested
from potluck.server.reduce.model_work import ModelWork
from potluck.server.service.guard import Context
from potluck.server.service.operator_service import OperatorService
from potluck.server.service.revocations import Revoking
from potluck.server.store import RunState, Store
from potluck.server.store.journal import Journal

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_SECONDS = 240.0
RUN_FILE = """
rounds = 5
clients_per_round = 2
expected_clients = 2
task = {name = "digits", clients = 2}
training = {steps = 2}
"""
PRETRAINING = (
    RUN_FILE.replace("digits", "colored-digits")
    + """
selector = {name = "feddiverse"}
profiles.triplet = {pretraining_rounds = 1, bias_steps = 1, attribute_steps = 1}
"""
)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members.make(tmp_path_factory.mktemp("members"), 2)


@pytest_asyncio.fixture(loop_scope="module")
async def federation(members: Members, tmp_path: Path) -> AsyncIterator[SumFederation]:
    async with sum_federation(members, tmp_path) as federation:
        yield federation


class Gate:
    """Makes a blocking method wait, from its `after`-th call on, until the gate is opened."""

    def __init__(self, honest: Callable[..., Any], after: int) -> None:
        self._honest = honest
        self._calls_left = after
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._calls_left -= 1
        if self._calls_left <= 0:
            self.reached.set()
            assert self.opened.wait(PATIENCE_SECONDS)
        return self._honest(*arguments, **options)

    async def is_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, PATIENCE_SECONDS)


@contextmanager
def held(owner: type, method: str, after: int = 1) -> Iterator[Gate]:
    """Hold calls of a method until the gate opens, at the latest until the block ends."""
    gate = Gate(getattr(owner, method), after)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, method, lambda *arguments, **options: gate(*arguments, **options))
        try:
            yield gate
        finally:
            gate.opened.set()


async def cancelled(task: asyncio.Task[Any]) -> None:
    with suppress(asyncio.CancelledError):
        await task


def operators(federation: SumFederation) -> OperatorService:
    coordinator, tls = federation.coordinator, federation.members.tls
    revoking = Revoking(coordinator.config.state_directory, tls.operator.authority, None)
    return OperatorService(coordinator, revoking)


async def test_stop_during_clean_up_after_a_commit_stops_the_run(
    federation: SumFederation,
) -> None:
    coordinator = federation.coordinator
    await federation.start()
    with held(Journal, "add") as gate:
        row = await coordinator.start_run(RUN_FILE)
        driver = coordinator.runs.driver(row.run_id)
        assert driver is not None

        def commits_the_second() -> bool:
            progress = driver.progress()
            return progress is not None and (progress.round, progress.phase) == (2, "commit")

        await until(commits_the_second)
        driver.post(StopRequested())
        await until(lambda: driver.progress() is None)
        gate.opened.set()
        row = await federation.ended(row.run_id)
    assert (row.state, row.committed_rounds) == (RunState.STOPPED, 1)


async def test_round_committed_during_a_stop_is_reported_to_watchers(
    federation: SumFederation,
) -> None:
    coordinator = federation.coordinator
    await federation.start()
    with held(Store, "commit_round") as gate:
        row = await coordinator.start_run(RUN_FILE)
        driver = coordinator.runs.driver(row.run_id)
        assert driver is not None
        watcher = driver.feed.watch()
        await gate.is_reached()
        driver.post(StopRequested())
        await until(lambda: driver.progress() is None)
        gate.opened.set()
        row = await federation.ended(row.run_id)
    assert (row.state, row.committed_rounds) == (RunState.STOPPED, 1)
    told: list[int] = []
    while (event := await watcher.get()) is not None:
        if event.HasField("committed"):
            told.append(event.committed.round)
    assert told == [1]


async def test_updates_that_arrive_during_a_stop_leave_no_files(
    federation: SumFederation,
) -> None:
    coordinator, state = federation.coordinator, federation.coordinator.config.state_directory
    kept = [federation.folder / host_of(client) / "updates" for client in federation.members.names]
    await federation.start()
    with held(ModelWork, "check_update") as checking, held(Store, "current_attempt") as ending:
        row = await coordinator.start_run(RUN_FILE)
        driver = coordinator.runs.driver(row.run_id)
        assert driver is not None
        await checking.is_reached()
        await until(lambda: all(any(folder.iterdir()) for folder in kept))
        driver.post(StopRequested())
        await ending.is_reached()
        checking.opened.set()
        await until(lambda: not any(any(folder.iterdir()) for folder in kept))
        ending.opened.set()
        row = await federation.ended(row.run_id)
    assert row.state is RunState.STOPPED
    assert not any((state / "spool").iterdir())


async def test_stop_before_pretraining_prevents_it(
    federation: SumFederation,
) -> None:
    coordinator = federation.coordinator
    with held(ModelWork, "initial_model") as gate:
        row = await coordinator.start_run(PRETRAINING)
        await gate.is_reached()
        stopping = asyncio.create_task(coordinator.stop_run(row.run_id))
        await coordinator.archive.run(row.run_id)  # answered after the stop call has read the run
        gate.opened.set()
        row = await stopping
    assert row.state is RunState.STOPPED


async def test_run_starts_if_its_operator_disconnects_during_the_start(
    federation: SumFederation,
) -> None:
    request = operator_pb2.StartRunRequest(run_file=RUN_FILE)
    with held(Store, "add_run") as gate:
        service = operators(federation)
        starting = asyncio.ensure_future(service.StartRun(request, cast(Context, None)))
        await gate.is_reached()
        starting.cancel()
        gate.opened.set()
        await cancelled(starting)
    [row] = await federation.coordinator.archive.runs()
    assert federation.coordinator.runs.driver(row.run_id) is not None


async def test_run_can_be_resumed_as_soon_as_its_end_is_stored(federation: SumFederation) -> None:
    coordinator = federation.coordinator
    row = await coordinator.start_run(RUN_FILE)
    driver = coordinator.runs.driver(row.run_id)
    assert driver is not None
    await driver.inbox()
    with held(Store, "set_run_state") as gate:
        driver.post(StopRequested())
        await gate.is_reached()
        resuming = asyncio.create_task(coordinator.resume_run(row.run_id))
        await asyncio.sleep(0)  # let it reach its call of the store
        gate.opened.set()
        row = await resuming
    assert row.state is RunState.WAITING
    assert coordinator.runs.driver(row.run_id) not in (None, driver)


async def test_host_that_disconnects_during_registration_is_not_connected(
    federation: SumFederation,
) -> None:
    hosts, attendance = federation.coordinator.hosts, federation.coordinator.attendance
    session = HostSession(
        host_id="host-0", client_ids=("client-0",), device="cpu", tasks=frozenset()
    )

    async def attend() -> None:
        async with hosts.attending(session):
            raise AssertionError("it was to be away by then")

    with held(Store, "see_clients") as gate:
        attending = asyncio.create_task(attend())
        await gate.is_reached()
        assert len(attendance.clients) == 1
        attending.cancel()
        await cancelled(attending)
        assert len(attendance.clients) == 0
