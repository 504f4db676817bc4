"""The examples, each installed and run as its README says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import venv
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from support.federation import until_listening
from support.repository import ROOT

EXAMPLES = ROOT / "examples"
PATIENCE_SECONDS = 240.0
_PORT = "7443"
_NOT_COPIED = shutil.ignore_patterns("pki", "state", "data", "build", "dist", "__pycache__")


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example, copied to a test's folder. environment: the folder into which `pip` installed
    it."""

    folder: Path
    environment: Path

    def blocks(self, label: str) -> list[str]:
        """Return the README's shell commands below each comment with that label."""
        readme = (self.folder / "README.md").read_text(encoding="utf-8")
        return re.findall(rf"<!-- {label} -->\n```sh\n(.*?)```", readme, flags=re.DOTALL)

    @property
    def log(self) -> str:
        """The output of all terminals so far."""
        return (self.folder / "terminals.log").read_text()

    async def tried(self, commands: str) -> tuple[int, str]:
        """Run commands; return their exit code and their output."""
        log = self.folder / "commands.log"
        log.write_bytes(b"")
        process = await self._shell(commands, log)
        return await asyncio.wait_for(process.wait(), PATIENCE_SECONDS), log.read_text()

    async def done(self, commands: str) -> str:
        """Run commands, which must succeed; return their output."""
        code, said = await self.tried(commands)
        assert code == 0, said + self.log
        return said

    @asynccontextmanager
    async def in_terminal(self, commands: str) -> AsyncIterator[None]:
        """Run commands in the background; end them afterwards."""
        process = await self._shell(commands, self.folder / "terminals.log")
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)

    def use_port(self, port: int, files: str = "*.toml") -> None:
        """Replace the README's port, which may be taken. All else is as in the README."""
        for file in self.folder.glob(files):
            file.write_text(file.read_text().replace(_PORT, str(port)))

    async def _shell(self, commands: str, log: Path) -> asyncio.subprocess.Process:
        programs = [self.environment / "bin", sysconfig.get_path("scripts"), os.environ["PATH"]]
        libraries = [_libraries(self.environment), os.environ.get("PYTHONPATH", "")]
        with log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *("bash", "-e", "-c", commands),
                cwd=self.folder,
                env={
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                    "PATH": os.pathsep.join(map(str, programs)),
                    "PYTHONPATH": os.pathsep.join(str(each) for each in libraries if each),
                },
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


def installed(name: str, folder: Path) -> Example:
    """Copy an example, and install it with its missing requirements.

    `pip` installs into a separate environment on top of this one, which does not change.
    """
    source, environment = folder / name, folder / "environment"
    shutil.copytree(EXAMPLES / name, source, ignore=_NOT_COPIED)
    (source / "terminals.log").touch()
    venv.create(environment, symlinks=True)
    below = sysconfig.get_path("purelib")
    (_libraries(environment) / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    example = Example(folder=source, environment=environment)
    [command] = example.blocks("install")
    pip, *arguments = command.split()
    assert (pip, arguments) == ("pip", ["install", "."]), command
    options = ["--quiet", "--no-compile", "--no-build-isolation"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    python = str(environment / "bin" / "python")
    subprocess.run(
        [python, "-m", "pip", *arguments, *options, *constraints], cwd=source, check=True
    )
    return example


async def carried_out(example: Example, port: int) -> str:
    """Run the README's commands after the installation; return the output of the operator's
    commands.

    port: the coordinator's port, written into files that still have the README's port.
    """
    [setup], terminals, [operator] = map(example.blocks, ("setup", "terminal", "operator"))
    await example.done(setup)
    example.use_port(port)
    async with contextlib.AsyncExitStack() as stack:
        for each in terminals:
            await stack.enter_async_context(example.in_terminal(each))
        await until_listening(port)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await example.tried("potluck clients"))[0] != 0:
                pass
        return await example.done(operator)


def link_libraries(environment: Path, *, without: Collection[str] = ()) -> None:
    """Link this environment's libraries into another environment, so that pip finds them installed
    there.

    without: distributions to omit.
    """
    here = Path(sysconfig.get_path("purelib"))
    left_out = {"pip", "__pycache__"}
    for name in without:
        left_out |= {file.parts[0] for file in distribution(name).files or ()}
    for entry in here.iterdir():
        target = _libraries(environment) / entry.name
        if entry.name not in left_out and not target.exists():
            target.symlink_to(entry)


def _libraries(environment: Path) -> Path:
    """Return the folder of an environment's libraries."""
    variables = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", "venv", variables))
