"""Processes forked from one that has imported everything."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from potluck.common.errors import RunError
from potluck.deploy.local.forked_processes import AVAILABLE, ForkedProcesses

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="forks are for Linux")


async def test_what_becomes_of_forked_processes(tmp_path: Path) -> None:
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
        await wrong.stop()  # may be asked again

        example = await forked.fork(
            "a coordinator", "potluck-server", ["config"], log=tmp_path / "example.log"
        )
        assert await example.ended() == 0
        assert "listen" in (tmp_path / "example.log").read_text()

        held = await forked.fork("a host", "potluck-client", ["--help"], log=tmp_path / "held.log")
        os.kill(held.group, signal.SIGKILL)
        assert await held.ended() in (0, 128 + signal.SIGKILL)  # it may have been faster
    finally:
        await forked.close()


async def test_a_fork_server_that_is_gone(tmp_path: Path) -> None:
    forked = await ForkedProcesses.start(tmp_path / "server.log")
    host = await forked.fork("a host", "potluck-client", ["--help"], log=tmp_path / "host.log")
    forked.server.kill()
    assert await host.ended() in (0, 128 + signal.SIGKILL)
    with pytest.raises(RunError, match="fork server ended with exit code -9"):
        await forked.fork("a host", "potluck-client", ["--help"], log=tmp_path / "other.log")
    await forked.close()
