"""The Python of README.md and the commands of the page on four terminals work word for word."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from safetensors import safe_open
from support.federation import until_listening

from potluck.deploy.local.demo_files import reserved_port

HOUSE = Path(__file__).resolve().parents[2]
README = HOUSE / "README.md"
FOUR_TERMINALS = HOUSE / "docs" / "start" / "four-terminals.md"
PORT = "7443"
PATIENCE_SECONDS = 240.0


def blocks(label: str) -> list[str]:
    """Return the shell commands below each comment with that label."""
    page = FOUR_TERMINALS.read_text()
    return re.findall(rf"<!-- {label} -->\n```sh\n(.*?)```", page, flags=re.DOTALL)


async def shell(folder: Path, commands: str, log: Path) -> asyncio.subprocess.Process:
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *("bash", "-e", "-c", commands),
            cwd=folder,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


async def to_its_end(folder: Path, commands: str) -> tuple[int, str]:
    log = folder / "commands.log"
    log.write_bytes(b"")
    process = await shell(folder, commands, log)
    return await asyncio.wait_for(process.wait(), PATIENCE_SECONDS), log.read_text()


def use_port(folder: Path, port: int) -> None:
    """Replace the page's port, which may be taken."""
    for file in folder.glob("*.toml"):
        file.write_text(file.read_text().replace(PORT, str(port)))


@asynccontextmanager
async def in_terminals(folder: Path, *commands: str) -> AsyncIterator[None]:
    """Run each command in a terminal of its own; end all of them afterwards."""
    log = folder / "terminals.log"
    terminals = [await shell(folder, command, log) for command in commands]
    try:
        yield
    finally:
        for terminal in terminals:
            os.killpg(terminal.pid, signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*(terminal.wait() for terminal in terminals))


async def test_documented_commands_start_a_federation_on_four_terminals(tmp_path: Path) -> None:
    [setup], [coordinator], hosts = blocks("setup"), blocks("coordinator"), blocks("host")
    [operator] = blocks("operator")
    assert len(hosts) == 2
    with reserved_port() as port:
        code, said = await to_its_end(tmp_path, setup)
        assert code == 0, said
        use_port(tmp_path, port)
        async with in_terminals(tmp_path, coordinator, *hosts):
            await until_listening(port)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (await to_its_end(tmp_path, "potluck clients"))[0] != 0:
                    pass
            code, said = await to_its_end(tmp_path, operator)
            named = await to_its_end(tmp_path, "potluck runs run --json; potluck stop run || true")
            gone = await to_its_end(tmp_path, "potluck model run --round 1 -o gone")
    assert code == 0, said + (tmp_path / "terminals.log").read_text()
    assert "round 10/10" in said
    assert '"name": "run"' in named[1]
    assert "is not in progress, but finished" in named[1]
    assert gone[0] == 1
    assert "round 1 of run" in gone[1]
    assert "was deleted; [retention] in a run file sets which models are kept" in gone[1]
    assert "is finished; 10 of 10 rounds committed" in said
    assert (tmp_path / "model.safetensors").stat().st_size > 10_000
    with safe_open(tmp_path / "model.safetensors", "np") as model:
        metadata = model.metadata()
    assert metadata["potluck.round"] == "10"
    assert json.loads(metadata["potluck.task"]) == {"name": "digits"}


async def test_readme_python_listing_trains_a_model(tmp_path: Path) -> None:
    [listing] = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len([line for line in listing.splitlines() if line]) <= 8
    script = tmp_path / "eight_lines.py"
    script.write_text(f"{listing}print(type(network).__name__)\n")
    code, said = await to_its_end(tmp_path, f"python {script}")
    assert code == 0, said
    *rounds, network = said.splitlines()
    assert [line.split()[0] for line in rounds] == ["1", "2", "3"]
    assert network == "Sequential"
