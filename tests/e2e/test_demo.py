"""`potluck demo` as a person runs it: real processes, real sockets, real training."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors import safe_open
from support.federation import set_values
from support.local_processes import processes_of, until_no_process_of
from torch import nn

from potluck.common.errors import RunError
from potluck.deploy.local.demo import run_demo
from potluck.deploy.local.demo_files import DemoOptions, reserved_port, write_demo_files
from potluck.federation import load_model

SMALL = ["--clients", "6", "--hosts", "2", "--clients-per-round", "3"]
PATIENCE_SECONDS = 240.0


async def start(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "potluck.deploy.cli", "demo", *SMALL),
        *("--folder", str(folder), "--json", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def until_said(process: asyncio.subprocess.Process, beginning: str) -> None:
    """Wait until a line on standard error begins with this text."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (line := await process.stderr.readline()).decode().startswith(beginning):
            assert line, "the demo ended too early"


async def interrupt(process: asyncio.subprocess.Process, number: signal.Signals, code: int) -> str:
    """Send a signal; return the last line on standard error."""
    process.send_signal(number)
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    assert (process.returncode, out) == (code, b"")
    return err.decode().splitlines()[-1]


async def run_to_its_end(folder: Path, *arguments: str) -> dict[str, Any]:
    process = await start(folder, "--rounds", "3", "--seed", "7", *arguments)
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    assert process.returncode == 0, err.decode()
    assert await processes_of(folder) == []
    lines = out.decode().splitlines()
    assert len(lines) == 1
    summary: dict[str, Any] = json.loads(lines[0])
    return summary


def timeless(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a run's rounds without values that depend on the clock."""
    keys = ("round", "cohort", "accuracy", "worst_group_accuracy", "loss")
    return [{key: entry[key] for key in keys} for entry in run["history"]]


def digest_of(model: Path) -> str:
    with safe_open(model, "np") as file:
        return str(file.metadata()["potluck.blake3"])


async def test_two_demos_with_the_same_seed_give_the_same_comparison(tmp_path: Path) -> None:
    first, second = await asyncio.gather(
        run_to_its_end(tmp_path / "first"), run_to_its_end(tmp_path / "second")
    )
    chosen, alone = first["runs"][1], tmp_path / "alone"
    assert [arm["selector"] for arm in first["arms"]] == ["uniform", "dc-balanced"]
    assert [len(run["history"]) for run in first["runs"]] == [3, 3]
    assert [timeless(run) for run in first["runs"]] == [timeless(run) for run in second["runs"]]
    assert json.loads((tmp_path / "first" / "summary.json").read_text()) == first
    assert (tmp_path / "first" / "run.png").read_bytes().startswith(b"\x89PNG")

    by_itself = await run_to_its_end(alone, "--selector", "dc-balanced")
    assert timeless(by_itself) == timeless(chosen)
    assert json.loads((alone / "summary.json").read_text()) == by_itself
    models = [tmp_path / name / "model-dc-balanced.safetensors" for name in ("first", "second")]
    assert len({digest_of(model) for model in (*models, alone / "model.safetensors")}) == 1
    assert isinstance(load_model(models[0]), nn.Module)


async def test_a_demo_interrupted_while_it_starts_leaves_no_process(tmp_path: Path) -> None:
    process = await start(tmp_path, "--rounds", "1000")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (tmp_path / "host-1.log").exists():  # noqa: ASYNC110  # files give no signal
            await asyncio.sleep(0.01)
    last = await interrupt(process, signal.SIGINT, 130)
    assert last == f"interrupted: no run was started. All processes have ended. Files: {tmp_path}"
    assert await processes_of(tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_demo_interrupted_while_it_trains_leaves_no_process(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = await start(tmp_path, "--rounds", "1000")
    await until_said(process, "round 1/")
    last = await interrupt(process, number, code)
    assert re.fullmatch(
        rf"interrupted: run uniform running, \d+ of 1000 rounds committed\. "
        rf"All processes have ended\. Files: {tmp_path}",
        last,
    )
    assert await processes_of(tmp_path) == []


async def test_killed_demo_leaves_no_process(tmp_path: Path) -> None:
    process = await start(tmp_path, "--rounds", "1000")
    await until_said(process, "round 1/")
    assert len(await processes_of(tmp_path)) == 4  # coordinator, two hosts, and the fork server
    process.kill()
    await process.wait()
    await until_no_process_of(tmp_path)


async def test_demo_names_a_host_that_cannot_start_and_its_log(tmp_path: Path) -> None:
    options = DemoOptions(
        task="digits",
        selector="uniform",
        strategy="fedavg",
        clients=6,
        hosts=2,
        count=3,
        rounds=3,
        seed=7,
        device="cpu",
    )
    with reserved_port() as port:
        files = write_demo_files(tmp_path, options, port)
        set_values(files.hosts[1], {"device": "cuda:99"})
        with pytest.raises(
            RunError, match=r"^process host-.* ended with exit code .*cuda:99"
        ) as told:
            await asyncio.wait_for(run_demo(files, Console(quiet=True)), PATIENCE_SECONDS)
    assert f"see the log {tmp_path}" in told.value.message
    assert await processes_of(tmp_path) == []
