"""Processes that a fork server with all modules imported starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.federation import until

from potluck.common.errors import RunError
from potluck.deploy.local.demo_files import Machines, reserved_port, write_federation_files
from potluck.deploy.local.forked_processes import AVAILABLE, ForkedProcesses

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="forks are for Linux")


async def test_forked_processes_report_their_exit_codes_and_logs(tmp_path: Path) -> None:
    forked = await ForkedProcesses.start(tmp_path / "server.log")
    try:
        missing = await forked.fork(
            "a host", "potluck-client", ["--config", "nowhere.toml"], log=tmp_path / "missing.log"
        )
        assert await missing.ended() == 1
        assert "nowhere.toml" in missing.exit_reason().message
        assert "exit code 1" in missing.exit_reason().message

        wrong = await forked.fork("a host", "potluck-client", ["--wat"], log=tmp_path / "wrong.log")
        assert await wrong.ended() == 2
        await wrong.stop()  # may be called twice

        example = await forked.fork(
            "a coordinator", "potluck-server", ["config"], log=tmp_path / "example.log"
        )
        assert await example.ended() == 0
        assert "listen" in (tmp_path / "example.log").read_text()

        held = await forked.fork("a host", "potluck-client", ["--help"], log=tmp_path / "held.log")
        with contextlib.suppress(ProcessLookupError):
            os.kill(held.group, signal.SIGKILL)
        assert await held.ended() in (0, 128 + signal.SIGKILL)  # it may have ended before SIGKILL
    finally:
        await forked.close()


async def test_forking_after_the_fork_server_died_is_an_error(tmp_path: Path) -> None:
    forked = await ForkedProcesses.start(tmp_path / "server.log")
    host = await forked.fork("a host", "potluck-client", ["--help"], log=tmp_path / "host.log")
    forked.server.kill()
    assert await host.ended() in (0, 128 + signal.SIGKILL)
    with pytest.raises(RunError, match="fork server ended with exit code -9"):
        await forked.fork("a host", "potluck-client", ["--help"], log=tmp_path / "other.log")
    await forked.close()


STARTER = """
import asyncio, sys
from pathlib import Path
from potluck.deploy.local.forked_processes import ForkedProcesses

async def main(folder, config):
    forked = await ForkedProcesses.start(folder / "server.log")
    host = await forked.fork("a host", "potluck-client", ["--config", config], log=folder / "log")
    print(forked.server.pid, host.group, flush=True)
    await host.ended()

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


def test_killing_the_fork_server_ends_its_processes(tmp_path: Path) -> None:
    sizes = "expected_clients = 1\nclients_per_round = 1\nrounds = 1\n"
    run_file = f'{sizes}[task]\nname = "digits"\nclients = 1\n'
    with reserved_port() as port:  # no process listens there
        machines = Machines(clients=1, hosts=1)
        files = write_federation_files(tmp_path / "files", run_file, machines, port)
        command = [sys.executable, "-c", STARTER, str(tmp_path), str(files.hosts[0])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
            assert starter.stdout is not None
            server, host = map(int, starter.stdout.readline().split())
            starter.send_signal(signal.SIGSTOP)  # a stopped starter can't end them itself
            try:
                assert Path(f"/proc/{host}").exists()
                os.kill(server, signal.SIGKILL)
                asyncio.run(until(lambda: not Path(f"/proc/{host}").exists()))
            finally:
                starter.kill()
