"""`potluck experiment` with real federations: killed half-way, resumed, and repeated."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from pyarrow import parquet
from support.federation import until

from potluck.deploy.local.demo_files import program

EXPERIMENT = """
name = "miniature"
seeds = [0]
hosts = 1
[run]
rounds = 2
clients_per_round = 2
[run.task]
name = "digits"
clients = 4
[run.virtual_clock]
enabled = true
draw = "client"
deadline_seconds = 1e6
drop_outs = { client-3 = 0.5 }
[axes.selection]
uniform = { selector = { name = "uniform" } }
fedentopt = { selector = { name = "fedentopt" } }
[reading]
baseline = { selection = "uniform" }
compared = "selection"
"""


def start(file: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [program("potluck"), "experiment", str(file), "--output", str(output), "--jobs", "1"]
    with (output.parent / f"{output.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def cells(output: Path) -> dict[str, float]:
    """Return the time at which each finished cell was written, by name."""
    return {path.name: path.stat().st_mtime_ns for path in (output / "cells").glob("*.json")}


def tables(output: Path) -> list[bytes]:
    names = ("rounds.parquet", "rounds.csv", "report.md", "ranks.png")
    return [(output / name).read_bytes() for name in names]


def under_way(output: Path) -> bool:
    """Return True if the first cell is finished and another has begun."""
    return bool(cells(output)) and any((output / "running").glob("*/coordinator/potluck.sqlite3"))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_killed_experiment_resumes_and_gives_the_same_tables(
    tmp_path: Path,
) -> None:
    file, output = tmp_path / "miniature.toml", tmp_path / "killed"
    file.write_text(EXPERIMENT)
    first = start(file, output)
    await until(lambda: first.poll() is not None or under_way(output))
    assert first.poll() is None, (tmp_path / "killed.log").read_text()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = cells(output)
    assert len(before) == 1
    assert not (output / "report.md").exists()

    second = start(file, output)
    assert second.wait() == 0, (tmp_path / "killed.log").read_text()
    after = cells(output)
    assert len(after) == 2
    assert {name: after[name] for name in before} == before
    assert not list((output / "running").iterdir())

    whole = start(file, tmp_path / "whole")
    assert whole.wait() == 0
    assert tables(tmp_path / "whole") == tables(output)
    assert "fedentopt" in (output / "report.html").read_text()
    rows = parquet.read_table(output / "rounds.parquet").to_pylist()
    assert all(row["downloads"] == row["selected"] == 2 for row in rows)
    assert all(row["simulated_seconds"] > 0 for row in rows)
    assert "chance to drop out" in (output / "report.md").read_text()


@pytest.mark.slow
async def test_second_concurrent_start_of_an_experiment_is_refused(
    tmp_path: Path,
) -> None:
    file, output = tmp_path / "miniature.toml", tmp_path / "shared"
    file.write_text(EXPERIMENT)
    both = [start(file, output), start(file, output)]
    assert sorted(each.wait() for each in both) == [0, 1], (tmp_path / "shared.log").read_text()
    assert "shared is in use by another experiment" in (tmp_path / "shared.log").read_text()
    assert len(cells(output)) == 2
