"""Runs that wait, over real gRPC: for clients that are silent, and for pre-training."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.sum_federation import Members, SumFederation, sum_federation

from potluck.client.disclosure.releases import Discloser
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.server.store import RunState

CLIENTS = 3
RUN_FILE = f"""
rounds = 1
clients_per_round = {CLIENTS}
expected_clients = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{steps = 2}}
selector = {{name = "fedentopt"}}
profiles.deadline_seconds = 8.0
round.quorum = 1.0
"""


@pytest_asyncio.fixture
async def federation(tmp_path: Path) -> AsyncIterator[SumFederation]:
    members = Members.make(tmp_path / "members", CLIENTS)
    async with sum_federation(members, tmp_path) as federation:
        await federation.start()
        yield federation


async def test_run_asks_silent_clients_again(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, asked = Discloser.answer, Counter[str]()

    async def answer(self: Discloser, instruction: rpc.Instruction, measure: Any) -> rpc.Profile:
        asked[instruction.client_id] += 1
        if instruction.client_id != "client-0" and asked[instruction.client_id] == 1:
            await asyncio.Event().wait()
        return await honest(self, instruction, measure)

    monkeypatch.setattr(Discloser, "answer", answer)
    row = await federation.coordinator.start_run(RUN_FILE)
    driver = federation.coordinator.runs.driver(row.run_id)
    assert driver is not None
    feed = driver.feed.watch()
    said: list[str] = []
    while (event := await feed.get()) is not None:
        said.append(event.notice.text)
    row = await federation.ended(row.run_id)
    assert row.state is RunState.FINISHED, row.reason
    assert asked == {"client-0": 1, "client-1": 2, "client-2": 2}
    [again] = [text for text in said if text.endswith("trying again later")]
    assert again.startswith("round 1: 1 clients may be selected, but at least 3 are needed; ")


async def test_run_reports_the_clients_that_its_pretraining_waits_for(
    federation: SumFederation,
) -> None:
    run_file = RUN_FILE.replace(
        f"expected_clients = {CLIENTS}", f"expected_clients = {CLIENTS + 1}"
    )
    run_file = run_file.replace(f"clients = {CLIENTS}", f"clients = {CLIENTS + 1}")
    run_file = run_file.replace('"digits"', '"colored-digits"').replace("fedentopt", "feddiverse")
    row = await federation.coordinator.start_run(run_file)
    async with federation.operator() as operator:
        while not (waiting := (await operator.list_runs())[0].waiting).what:
            pass
        assert (
            waiting.what == f"{CLIENTS} of {CLIENTS + 1} clients are connected; waiting for 1 more"
        )
        assert waiting.HasField("until")
        [described] = (await operator.describe_coordinator()).runs
        assert (described.run_id, described.waiting) == (row.run_id, waiting)
        events = operator.watch_run(row.run_id)
        async for event in events:
            if event.HasField("status"):
                assert event.status.waiting == waiting
                break
        await events.aclose()
        await operator.stop_run(row.run_id)
