"""`potluck experiment --ray` and `potluck bench --ray` on a real cluster: a killed node, spread
hosts, Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.federation import until
from support.ray_cluster import RayCluster
from support.tiny_tier import TINY
from typer.testing import CliRunner

from potluck.deploy.local.demo_files import program
from potluck.experiments.benchmark import tier as tiers
from potluck.experiments.benchmark.standing import ArmResult, read_result
from potluck.experiments.benchmark.tier import Tier
from potluck.experiments.commands.bench_command import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXPERIMENT = """
name = "miniature"
seeds = [0, 1]
hosts = 1
[run]
rounds = 2
clients_per_round = 2
[run.task]
name = "mnist"
clients = 4
[run.training]
epochs = 1
[axes.selection]
uniform = { selector = { name = "uniform" } }
fedentopt = { selector = { name = "fedentopt" } }
robin = { selector = { name = "round-robin" } }
[reading]
baseline = { selection = "uniform" }
[quick]
seeds = [0]
axes = { selection = { uniform = {} } }
"""

TIER = Tier.model_validate(
    TINY.model_dump()
    | {
        "name": "full",  # no results of it come with Potluck, so the baseline runs too
        "tuning": {"seeds": [9], "settings": 2},
        "arms": {"uniform": {}, "dc-balanced": {"grid": {"added": [3]}}},
    }
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with RayCluster(tmp_path_factory.mktemp("node"), [1, 1, 1]) as cluster:
        yield cluster


@pytest.fixture
def file(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    labels = {part: np.arange(size) % 10 for part, size in (("train", 200), ("test", 60))}
    arrays: dict[str, Any] = {f"y_{part}": each for part, each in labels.items()}
    for part, each in labels.items():
        images = generator.integers(0, 256, (len(each), 28, 28), dtype=np.uint8)
        arrays[f"x_{part}"] = images
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "mnist.npz", **arrays)
    (tmp_path / "data" / "other.npz").write_bytes(b"no cell reads it")
    path = tmp_path / "miniature.toml"
    path.write_text(EXPERIMENT)
    return path


def start(file: Path, output: str, *options: str) -> subprocess.Popen[bytes]:
    command = [program("potluck"), "experiment", str(file), "--output", output, *options]
    with (file.parent / f"{output}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=file.parent, stdout=log, stderr=log)


def said(file: Path, output: str) -> str:
    return (file.parent / f"{output}.log").read_text()


def finished(file: Path, output: str) -> int:
    return len(list((file.parent / output / "cells").glob("*.json")))


def tables(file: Path, output: str) -> list[bytes]:
    names = ("rounds.parquet", "rounds.csv", "report.md")
    return [(file.parent / output / name).read_bytes() for name in names]


def run_on_ray(
    file: Path, cluster: RayCluster, output: str, *options: str
) -> subprocess.Popen[bytes]:
    return start(file, output, "--ray", cluster.address, *options)


async def test_hosts_on_separate_nodes_give_the_same_tables(
    file: Path, cluster: RayCluster
) -> None:
    options = ["--quick", "--hosts", "2"]
    spread = run_on_ray(file, cluster, "spread", *options, "--ray-hosts-apart", "--jobs", "1")
    here = start(file, "here", *options)
    assert spread.wait() == 0, said(file, "spread")
    assert here.wait() == 0, said(file, "here")
    assert tables(file, "spread") == tables(file, "here")
    await until(cluster.is_idle)


async def test_missing_cluster_resources_are_refused_at_the_start(
    file: Path, cluster: RayCluster
) -> None:
    started = run_on_ray(file, cluster, "lacking", "--quick", "--ray-gpus", "1")
    assert started.wait() == 1
    assert "a cell of the experiment needs 1 GPU, but the cluster has 0" in said(file, "lacking")


def test_bench_gives_the_same_row(
    tmp_path: Path, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arm is tuned on the cluster too, so the command connects to it several times."""
    monkeypatch.setattr(tiers, "tier_named", lambda name: TIER)

    def row(output: str, *options: str) -> ArmResult:
        folder = tmp_path / output
        command = ["uniform", "dc-balanced", "--tier", "full", "--output", str(folder), *options]
        told = CliRunner().invoke(app, command, catch_exceptions=False)
        assert told.exit_code == 0, told.output
        assert "| dc-balanced |" in told.output
        return read_result(folder / "results" / "dc-balanced.json", TIER)

    here, there = row("here", "--jobs", "2"), row("there", "--ray", cluster.address)
    assert here.tried == [{}, {"selector.added": 3}]
    assert there == here.model_copy(update={"server_seconds": there.server_seconds})


async def under_way_after(count: int, run: subprocess.Popen[bytes], file: Path) -> None:
    """Wait until `count` cells are finished; the experiment must still be running."""
    output = str(run.args[4])  # type: ignore[index]  # arguments are a list
    await until(lambda: run.poll() is not None or finished(file, output) >= count)
    assert run.poll() is None, said(file, output)


async def test_interrupted_or_killed_driver_leaves_no_process_and_resumes(
    file: Path, cluster: RayCluster
) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        run = run_on_ray(file, cluster, "twice", "--jobs", "1")
        await under_way_after(finished(file, "twice") + 1, run, file)
        await until(lambda: bool(cluster.processes()))
        run.send_signal(number)
        assert run.wait() in (128 + signal.SIGINT, -signal.SIGKILL)
        await until(lambda: not cluster.processes())
    assert 2 <= finished(file, "twice") < 6
    assert len(list((file.parent / "twice" / "cells").iterdir())) == finished(file, "twice")


async def test_killed_node_gives_the_same_tables(file: Path, cluster: RayCluster) -> None:
    killed = run_on_ray(file, cluster, "killed")
    await under_way_after(2, killed, file)
    cluster.kill_a_node()
    assert killed.wait() == 0, said(file, "killed")
    assert "lost: " in said(file, "killed")
    assert finished(file, "killed") == 6
    here = start(file, "here")
    assert here.wait() == 0, said(file, "here")
    assert tables(file, "killed") == tables(file, "here")
    await until(cluster.is_idle)
    kept = {path.name for path in (cluster.folder / "files").iterdir()} - {"lock"}
    assert len(kept) == 1  # only the data set, once
