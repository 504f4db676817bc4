"""A coordinator with a long history, as its operator sees it: in pages, and all of it."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.stored import AT, RUN, add_rounds, begun_run

from potluck.common.settings.configuration import load
from potluck.deploy.local.demo_files import DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation
from potluck.deploy.operator import operator_client
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.view.watch import LinesDisplay, follow
from potluck.server.config import CoordinatorConfig
from potluck.server.service.serving import serving
from potluck.server.store import ClientSeen, RunState, Store

ROUNDS = 250
RUNS = 25


@asynccontextmanager
async def old_coordinator(folder: Path) -> AsyncIterator[OperatorClient]:
    """Run a coordinator with a finished run of many rounds, many other runs and many clients."""
    options = DemoOptions(
        task="digits", selector="uniform", strategy="fedavg", clients=2, hosts=1, count=2,
        rounds=1, seed=7, device="cpu",
    )  # fmt: skip
    with reserved_port() as port:
        files = write_demo_files(folder / "federation", options, port)
        config = load(CoordinatorConfig, files.coordinator, environment_prefix="NONE")
        config.state_directory.mkdir(parents=True, exist_ok=True)
        url = config.database_url()
        with Store.open(url) as store:
            for number in range(RUNS):
                store.add_run(replace(RUN, run_id=f"old-{number:02d}"))
                store.set_run_state(f"old-{number:02d}", RunState.FINISHED, "", AT)
            begun_run(store)
            seen = [
                ClientSeen(client_id=f"c{number}", host_id="h", device="cpu", at=AT)
                for number in range(RUNS)
            ]
            store.see_clients(seen)
        add_rounds(url, RUN.run_id, range(1, ROUNDS + 1))
        with Store.open(url) as store:
            store.set_run_state(RUN.run_id, RunState.FINISHED, "", AT)
        async with serving(config), LocalFederation(files).operator() as operator:
            yield operator


async def told(operator: OperatorClient, **asked: int) -> list[int]:
    """Return the committed rounds that a watcher receives."""
    async with aclosing(operator.watch_run(RUN.run_id, **asked)) as events:
        return [e.committed.round async for e in events if e.WhichOneof("event") == "committed"]


async def test_operator_receives_the_requested_number_of_past_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = list(range(1, ROUNDS + 1))
    async with old_coordinator(tmp_path) as operator:
        assert await told(operator) == everything
        assert await told(operator, newest_rounds=3) == everything[-3:]
        assert await told(operator, after_round=120) == everything[120:]
        assert await told(operator, after_round=249, newest_rounds=10) == [ROUNDS]
        # A watcher that has seen later rounds, before a backup was restored, receives no round
        # twice.
        assert await told(operator, after_round=ROUNDS + 7) == []

        monkeypatch.setattr(operator_client, "PAGE_SIZE", 10)
        assert len(await operator.list_runs()) == RUNS + 1
        newest = await operator.newest_run()
        assert newest is not None
        assert newest.run_id == RUN.run_id
        clients = [each.client_id for each in await operator.list_clients()]
        assert clients == sorted(f"c{number}" for number in range(RUNS))


async def test_watching_a_long_run_shows_its_newest_rounds(tmp_path: Path) -> None:
    output = io.StringIO()
    async with old_coordinator(tmp_path) as operator:
        view = await follow(operator, RUN.run_id, LinesDisplay(output), newest_rounds=5)
    assert sorted(view.committed) == list(range(ROUNDS - 4, ROUNDS + 1))
    assert view.ended
    assert output.getvalue().count("\n") == 6  # the status, and five rounds
