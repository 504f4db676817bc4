"""`potluck demo` as a person runs it: real processes, real sockets, real training."""

from __future__ import annotations

import asyncio
import json
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

SMALL = ["--clients", "6", "--hosts", "2", "--count", "3"]
PATIENCE_SECONDS = 120.0


async def start(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "potluck.deploy.cli", "demo", *SMALL),
        *("--folder", str(folder), "--json", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def until_said(process: asyncio.subprocess.Process, beginning: str) -> None:
    """Wait until a line on standard error begins like that."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (line := await process.stderr.readline()).decode().startswith(beginning):
            assert line, "the demo ended too early"


async def interrupt(process: asyncio.subprocess.Process, number: signal.Signals, code: int) -> None:
    process.send_signal(number)
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    assert (process.returncode, out) == (code, b"")


async def run_to_its_end(folder: Path) -> dict[str, Any]:
    process = await start(folder, "--rounds", "3", "--seed", "7")
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    assert process.returncode == 0, err.decode()
    assert await processes_of(folder) == []
    lines = out.decode().splitlines()
    assert len(lines) == 1
    summary: dict[str, Any] = json.loads(lines[0])
    return summary


async def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    first, second = await asyncio.gather(
        run_to_its_end(tmp_path / "first"), run_to_its_end(tmp_path / "second")
    )
    timeless = ("round", "cohort", "accuracy", "worst_group_accuracy", "loss")
    assert len(first["history"]) == 3
    assert [{key: entry[key] for key in timeless} for entry in first["history"]] == [
        {key: entry[key] for key in timeless} for entry in second["history"]
    ]
    models = [tmp_path / name / "model.safetensors" for name in ("first", "second")]
    digests = set()
    for path in models:
        with safe_open(path, "np") as file:
            digests.add(file.metadata()["potluck.blake3"])
    assert len(digests) == 1
    assert isinstance(load_model(models[0]), nn.Module)
    assert json.loads((tmp_path / "first" / "summary.json").read_text()) == first
    assert (tmp_path / "first" / "run.png").read_bytes().startswith(b"\x89PNG")


async def test_a_demo_interrupted_while_it_starts_leaves_no_process(tmp_path: Path) -> None:
    process = await start(tmp_path, "--rounds", "1000")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (tmp_path / "host-1.log").exists():  # noqa: ASYNC110  # files give no signal
            await asyncio.sleep(0.01)
    await interrupt(process, signal.SIGINT, 130)
    assert await processes_of(tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_demo_interrupted_while_it_trains_leaves_no_process(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = await start(tmp_path, "--rounds", "1000")
    await until_said(process, "round 1/")
    await interrupt(process, number, code)
    assert await processes_of(tmp_path) == []


async def test_a_killed_demo_takes_its_processes_along(tmp_path: Path) -> None:
    process = await start(tmp_path, "--rounds", "1000")
    await until_said(process, "round 1/")
    assert len(await processes_of(tmp_path)) == 4  # coordinator, two hosts, and what forked them
    process.kill()
    await process.wait()
    await until_no_process_of(tmp_path)


async def test_a_host_that_can_not_start_is_told_with_its_log(tmp_path: Path) -> None:
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
        with pytest.raises(RunError, match=r"^host-.* ended with exit code .*cuda:99") as told:
            await asyncio.wait_for(run_demo(files, Console(quiet=True)), PATIENCE_SECONDS)
    assert f"its log is {tmp_path}" in told.value.message
    assert await processes_of(tmp_path) == []
