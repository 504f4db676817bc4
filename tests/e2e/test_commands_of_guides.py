"""Commands of docs/guides and docs/deploy: each is run here or by the test that is named for it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from support.doc_pages import blocks
from support.repository import ROOT

from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_overrides import override
from potluck.rpc.v1.operator_pb2 import RunState

PATIENCE_SECONDS = 240.0
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

ELSEWHERE = {
    "make test-gpu": "Makefile",
    "python benchmarks/gpu.py": "tests/unit/test_house.py",
    "version=$(python3 common/potluck/common/net/build_version.py)": "tests/e2e/test_compose.py",
    "docker build": "tests/e2e/test_compose.py",
    "docker compose -f docker-compose.relay.yml up": "tests/e2e/test_compose.py",
    "potluck deploy plan": "tests/e2e/test_deploy.py",
    "potluck deploy up": "tests/e2e/test_deploy.py",
    "potluck deploy status": "tests/e2e/test_deploy.py",
    "potluck run run.toml --watch": "tests/e2e/test_first_federation.py",
    "potluck-relay --config": "tests/integration/test_relay.py",
    "potluck-relay check": "tests/integration/test_relay.py",
    "potluck page": "tests/e2e/test_page.py",
    "ssh -t": "tests/e2e/test_page.py",
    "pip install -c constraints.txt '.[experiments,ray]'": "tests/e2e/test_extras.py",
    "pip install ./brightness-signal": "tests/integration/test_writing_a_signal.py",
    "pip install ./circle-task": "tests/integration/test_writing_a_task.py",
    "pip install ./fair-strategy": "tests/integration/test_writing_a_strategy.py",
    "pip install ./readings-task": "tests/integration/test_writing_a_trainer.py",
    "pip install ./rare-first-selector": "tests/integration/test_writing_a_selector.py",
    "potluck select --selector rare-first": "tests/integration/test_writing_a_selector.py",
    "potluck select run.toml": "tests/unit/deploy/commands/test_select_command.py",
    "potluck new selector": "tests/integration/test_new_selector.py",
    "cd my-choice-selector": "tests/integration/test_new_selector.py",
    "pip install -e '.[test]'": "tests/integration/test_new_selector.py",
    "pytest": "tests/integration/test_new_selector.py",
    "potluck select --selector my-choice": "tests/integration/test_new_selector.py",
    "potluck bench": "tests/e2e/test_bench.py",
    "cp potluck-experiments/bench-smoke": "tests/e2e/test_bench.py",
    "cd ~/src/potluck": "tests/e2e/test_bench.py",
    "python tools/leaderboard_page.py": "tests/e2e/test_bench.py",
    "potluck data prepare mnist": "tests/unit/experiments/data_sets/test_data_sets.py",
    "potluck data prepare shakespeare": "tests/unit/experiments/data_sets/test_natural_clients.py",
    "potluck experiment": "tests/unit/experiments/test_experiments.py",
    "potluck traces": "tests/unit/experiments/traces/test_traces.py",
    "ray start": "tests/e2e/test_experiment_on_ray.py",
}
"""Beginnings of commands that this module does not run, each with the file that tests it."""


def commands() -> list[str]:
    """Return all commands of the guides and of the pages on deployment, without their comments."""
    found = []
    for block in blocks("sh", "console", "bash"):
        if block.page.parent.name not in ("guides", "deploy"):
            continue
        lines = block.text.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found += [re.sub(r"\s+# .*", "", line).strip() for line in lines if line.strip()]
    return list(dict.fromkeys(found))


def run_here(*beginnings: str) -> list[str]:
    return [command for command in commands() if command.startswith(beginnings)]


OF_RUNS = run_here("potluck runs", "potluck model", "potluck evaluate", "potluck report",
                   "potluck clients", "potluck-client kept")  # fmt: skip
DEMOS = run_here("potluck demo")
OF_FILES = run_here(
    "potluck pki", "potluck config", "potluck deploy config", "potluck-client enroll",
    "potluck-relay config", "potluck select --selector feddiverse",
)  # fmt: skip


def test_each_command_of_the_guides_is_run_by_a_test() -> None:
    rest = [c for c in commands() if c not in {*OF_RUNS, *DEMOS, *OF_FILES}]
    unknown = [c for c in rest if not c.startswith(tuple(ELSEWHERE))]
    assert unknown == []
    unused = [start for start in ELSEWHERE if not any(c.startswith(start) for c in rest)]
    assert unused == []
    assert all((ROOT / file).is_file() for file in ELSEWHERE.values())


async def typed(folder: Path, command: str, names: Mapping[str, str], answer: str = "") -> str:
    """Run a command to its end, check that it succeeds, and return its output."""
    for name, actual in names.items():
        command = re.sub(rf"(?<![\w.]){re.escape(name)}\b", actual, command)
    process = await asyncio.create_subprocess_exec(
        *("bash", "-e", "-c", command),
        cwd=folder,
        env=ENVIRONMENT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await asyncio.wait_for(process.communicate(answer.encode()), PATIENCE_SECONDS)
    assert process.returncode == 0, f"{command}: {printed.decode()}"
    return printed.decode()


@pytest_asyncio.fixture
async def files(tmp_path: Path) -> AsyncIterator[DemoFiles]:
    """Run a federation of processes, and finish two runs in it: best-kept and layer-kept."""
    options = DemoOptions(
        task="digits", selector="uniform", strategy="fedavg", clients=4, hosts=1, count=4,
        rounds=2, seed=1, device="cpu",
    )  # fmt: skip
    with reserved_port() as port:
        made = write_demo_files(tmp_path / "federation", options, port)
        async with LocalFederation(made) as federation:
            await federation.start()
            async with federation.operator() as operator:
                await finished(operator, made, "best-kept", "retention.keep_best=accuracy")
                await finished(
                    operator, made, "layer-kept", 'model.keep=["3.*"]',
                    "task.held_out=0.25", "task.central_test=false",
                )  # fmt: skip
            yield made


async def finished(operator: OperatorClient, files: DemoFiles, name: str, *settings: str) -> None:
    text = override(files.run_file, [f"name={name}", *settings], source="the test")
    async for event in operator.watch_run(await operator.start_run(text)):
        if event.status.state == RunState.RUN_STATE_FINISHED:
            return
    pytest.fail(f"run {name} did not finish")


async def test_guide_commands_on_runs_succeed(files: DemoFiles) -> None:
    names = {"3f9a": "best-kept", "RUN": "best-kept", "host.toml": str(files.hosts[0])}
    kept = [command for command in OF_RUNS if command.startswith("potluck-client kept")]
    printed = [
        await typed(files.folder, command, names) for command in OF_RUNS if command not in kept
    ]
    assert any("best" in text for text in printed)
    for file in ("best.safetensors", "report.png"):
        assert (files.folder / file).stat().st_size > 0
    await typed(files.folder, "potluck model layer-kept -o model.safetensors", {})
    assert "client-3" in await typed(files.folder, kept[0], names)
    await typed(files.folder, kept[1], names)
    assert (files.folder / "ours.safetensors").stat().st_size > 0


@pytest.mark.parametrize("command", DEMOS, ids=lambda text: text[-40:])
async def test_guide_demo_finishes(command: str, tmp_path: Path) -> None:
    printed = await typed(tmp_path, command, {})
    assert "is finished" in printed
    if "stop.patience" in command:
        assert re.search(
            r"stopped early: loss has not improved by more than 0\.01 in 3 evaluations; "
            r"its best is 0\.\d+ in round \d+; \d+ of 60 rounds committed",
            printed,
        )


async def test_guide_commands_on_files_succeed(tmp_path: Path) -> None:
    clients = [
        {"id": f"client-{n}", "triplet": [n % 3 / 3, n % 4 / 4, n % 5 / 5]} for n in range(12)
    ]
    (tmp_path / "profiles.json").write_text(json.dumps({"classes": 3, "clients": clients}))
    await typed(tmp_path, "potluck pki init pki --federation demo", {})
    requests_first = sorted(OF_FILES, key=lambda command: command.startswith("potluck pki sign"))
    for command in requests_first:
        # On the page, another machine makes the request, in a folder of the same name.
        names = {"enroll pki": "enroll there", "lab-a.csr": "there/lab-a.csr"}
        await typed(tmp_path, command, names, answer="y\n")
    for file in ("relay.toml", "federation.toml", "operator.toml", "selection.png", "pki/gate.pem"):
        assert (tmp_path / file).stat().st_size > 0
