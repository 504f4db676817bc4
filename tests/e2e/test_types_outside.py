"""A strict type checker finds the types of the installed package in a program outside of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """\
from potluck.common.run_file.run_settings import RoundPolicy
from potluck.federation import Federation

with Federation.local(hosts=2) as federation:
    run = federation.run(task="digits", rounds=2, round=RoundPolicy(deadline_seconds=60))
    for committed in run:
        reveal_type(committed.accuracy)
    reveal_type(run.state)
    federation.run(task="digits", rounds="two")
    federation.run(task="digits", rouns=2)
"""


def test_strict_type_checker_reads_the_types_of_the_installed_package(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"typeCheckingMode": "strict", "reportMissingTypeStubs": "error"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, "-p", str(tmp_path)], capture_output=True, text=True, check=False
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    said = {
        kind: [each["message"] for each in found if each["severity"] == kind]
        for kind in ("information", "error")
    }
    types = [message.rpartition(" is ")[2] for message in said["information"]]
    assert types == ['"float | None"', '"str"']
    wrong, unknown = said["error"]
    assert '"rounds"' in wrong
    assert 'No parameter named "rouns"' in unknown
