"""Connections to engines over ssh, and messages about engines that can't be reached."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from potluck.common.errors import UnreachableError
from potluck.deploy.machines.docker_engine import connected
from potluck.deploy.machines.inventory import MachineSettings

SSH = """#!/bin/sh
echo "$@" >> {record}
echo "ssh: Could not resolve hostname nowhere.invalid" >&2
exit 255
"""

PREEMPTED_SSH = """#!{python}
import http.server, socketserver, sys, time

class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{{"ApiVersion": "1.44"}}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

path = sys.argv[sys.argv.index("-L") + 1].partition(":")[0]
server = socketserver.UnixStreamServer(path, Engine, bind_and_activate=False)
server.server_bind()
time.sleep(0.3)  # another process has the processor: the socket exists and refuses
server.server_activate()
server.serve_forever()
"""
"""An ssh that is interrupted after it has bound its socket and before it listens."""


def put_ssh(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `ssh` be this program."""
    program = folder / "ssh"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_engine_is_reached_though_ssh_listens_a_little_later_than_its_socket_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_ssh(tmp_path, PREEMPTED_SSH.format(python=sys.executable), monkeypatch)
    machine = MachineSettings(name="near", engine="ssh://root@near.invalid")
    with connected(machine) as client:
        assert client.api.api_version == "1.44"


def test_ssh_command_in_the_error_message_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record"
    put_ssh(tmp_path, SSH.format(record=record), monkeypatch)
    machine = MachineSettings(
        name="far", engine="ssh://root@nowhere.invalid:2222", ssh_options=("-i", "a key")
    )
    with pytest.raises(UnreachableError) as caught, connected(machine):
        pass
    [advice] = re.findall("`(.*)`", caught.value.message)
    command = shlex.split(advice)
    assert command[0] == "ssh"
    assert command[-5:] == ["-p", "2222", "--", "nowhere.invalid", "true"]
    assert command[command.index("-i") + 1] == "a key"
    assert subprocess.run(command, check=False, capture_output=True).returncode == 255
    assert record.read_text().count("nowhere.invalid true") == 1
