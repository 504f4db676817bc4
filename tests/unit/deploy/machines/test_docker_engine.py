"""Messages about engines that can't be reached."""

from __future__ import annotations

import re
import shlex
import subprocess
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


def test_ssh_command_in_the_error_message_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record"
    program = tmp_path / "ssh"
    program.write_text(SSH.format(record=record))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
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
