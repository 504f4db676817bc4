"""Sinks record each round of a run once, even if processes are killed, hang or die."""

from __future__ import annotations

import contextlib
import csv
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
ROUNDS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    sinks = {
        "mlflow": {"experiment": "under test"},
        "watched": {},
        "hanging": {"silence_timeout_seconds": 600},
        "dying": {},
    }
    async with crash_federation(
        tmp_path_factory.mktemp("sinks"), rounds=ROUNDS, coordinator={"sinks": sinks}
    ) as federation:
        yield federation


def delivered(federation: Federation, sink: str, run_id: str) -> bool:
    """Return True if a sink has received the whole run."""
    notes = federation.state / "sinks" / sink / "delivered.json"
    return notes.exists() and run_id in notes.read_text()


def numbers_in(path: Path) -> list[int]:
    """Return the round numbers in a CSV file, in order."""
    with path.open() as file:
        return [int(row["round"]) for row in csv.DictReader(file)]


def steps_in_mlflow(folder: Path) -> dict[str, list[int]]:
    """Return the steps that MLflow has stored for its only run, by metric."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        [(status,)] = database.execute("SELECT status FROM runs")
        assert status == "FINISHED"
        steps: dict[str, list[int]] = {}
        for name, step in database.execute("SELECT key, step FROM metrics ORDER BY step"):
            steps.setdefault(name, []).append(step)
    return steps


async def test_sinks_record_each_round_once_after_three_kills_of_the_coordinator(
    federation: Federation,
) -> None:
    points = federation.points
    points.hold("sink-hang")
    points.kill("sink-begin")
    run_id = await federation.start_run()
    for committed, point in ((1, "sink-written"), (3, "sink-begin"), (6, "sink-written")):
        await federation.until_committed(run_id, committed)
        await federation.kill_coordinator()
        points.kill(point)
        await federation.restart_coordinator()
    await federation.finished(run_id)
    folder = federation.state / "sinks"
    everyone = list(range(1, ROUNDS + 1))
    for sink in ("mlflow", "watched"):
        await until(lambda: delivered(federation, sink, run_id), f"{sink} has the run")  # noqa: B023  # awaited at once
    steps = steps_in_mlflow(folder / "mlflow")
    assert {"accuracy", "loss", "seconds", "bytes_up", "included"} <= set(steps)
    assert {name: of for name, of in steps.items() if of != everyone} == {}
    assert numbers_in(folder / "watched" / f"{run_id}.csv") == everyone
    assert points.reached("sink-hang")
    assert not delivered(federation, "hanging", run_id)
    assert not delivered(federation, "dying", run_id)
