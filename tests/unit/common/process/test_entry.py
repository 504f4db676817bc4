"""Start of the three programs: Ctrl-C at any moment, and the version."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.programs import MODULES, run_program
from support.repository import ROOT

from potluck.common.net.build_version import software_version

PROGRAMS = sorted(MODULES)

INTERRUPTING = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()\n"
"""Module that simulates Ctrl-C in the middle of its import."""


def test_console_scripts_point_to_the_main_functions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {
        program: f"{module}.__main__:main" for program, module in MODULES.items()
    }


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("module", ["typer", "pydantic", "grpc"])
def test_ctrl_c_during_imports_prints_no_traceback(
    program: str, module: str, tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text(INTERRUPTING)
    environment = {"PYTHONPATH": str(tmp_path)}
    ended = run_program(program, "--help", folder=tmp_path, environment=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_on_windows_exits_with_one_line_that_recommends_wsl2(program: str) -> None:
    begin = f"import sys; sys.platform = 'win32'; from {MODULES[program]}.__main__ import main"
    ended = subprocess.run(
        [sys.executable, "-c", f"{begin}; main()"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith("potluck: Potluck does not run on Windows")
    assert "WSL2" in line


def test_importing_the_package_on_windows_raises_import_error() -> None:
    code = "import sys; sys.platform = 'win32'; import potluck.federation"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.stderr.splitlines()[-1].startswith("ImportError: Potluck does not run on Windows")


@pytest.mark.parametrize("program", PROGRAMS)
def test_version_option_prints_program_and_version(program: str, tmp_path: Path) -> None:
    ended = run_program(program, "--version", folder=tmp_path)
    told = f"{program} {software_version()}\n".encode()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, told, b"")
