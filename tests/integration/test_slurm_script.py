"""The batch script of a Slurm job, run by bash without Slurm."""

from __future__ import annotations

import os
import subprocess
from importlib import resources
from pathlib import Path

from potluck.deploy.machines.slurm import SCRIPT


def test_slurm_setup_may_use_unset_variables(tmp_path: Path) -> None:
    program = tmp_path / "potluck-client"
    program.write_text('#!/bin/sh\necho "$ACTIVATED $2"\n')
    program.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "POTLUCK_SETUP": 'export ACTIVATED="yes$SOME_UNSET_VARIABLE"',
    }
    with resources.as_file(resources.files("potluck.deploy.machines") / SCRIPT) as script:
        done = subprocess.run(
            ["bash", str(script), "host.toml"],  # the PATH's bash, as on a cluster
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "yes host.toml\n", "")
