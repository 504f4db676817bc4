"""The package that `potluck new selector` writes is installed, passes its tests and selects."""

import os
import subprocess
import sys
from pathlib import Path

from support.programs import MODULES, run_program

POTLUCK = [sys.executable, "-m", MODULES["potluck"]]


def test_new_selector_installs_passes_its_tests_and_selects(tmp_path: Path) -> None:
    made = run_program("potluck", "new", "selector", "my-choice", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    package, target = tmp_path / "my-choice-selector", tmp_path / "installed"
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(target)]
    subprocess.run([*pip, str(package)], check=True)

    def run(*command: str) -> str:
        ended = subprocess.run(
            command,
            cwd=package,
            env=os.environ | {"PYTHONPATH": str(target)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    assert "7 passed" in run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    options = ["--profiles", "profiles.json", "--rounds", "2", "--clients-per-round", "2"]
    shown = run(*POTLUCK, "select", "--selector", "my-choice", *options)
    assert shown.count("earlier selections: 0") == 4
