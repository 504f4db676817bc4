"""Folders for one process at a time: a second one is refused and changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.pki import make_federation
from support.programs import run_program

from potluck.common.errors import ConfigurationError
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.common.process.folder_lock import FolderLock
from potluck.deploy.local.demo_files import hold
from potluck.experiments.grid.results import ResultsFolder
from potluck.server.config import CoordinatorConfig
from potluck.server.service.coordinator import Coordinator

EXPERIMENT = """
name = "miniature"
seeds = [0]
[run]
rounds = 1
clients_per_round = 2
[run.task]
name = "digits"
clients = 4
"""
HOLD_AND_WAIT = """
import pathlib, sys
from potluck.common.process.folder_lock import FolderLock
lock = FolderLock(pathlib.Path(sys.argv[1]), holder="test", remedy="wait")
print("held", flush=True)
sys.stdin.read()
"""


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_second_start_of_a_running_experiment_is_refused_and_changes_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "miniature.toml").write_text(EXPERIMENT)
    arguments = ("experiment", "miniature.toml", "--output", "results")
    with ResultsFolder(tmp_path / "results").opened():
        (tmp_path / "results" / "running" / "cell").write_text("under way")
        before = everything_in(tmp_path)
        ended = run_program("potluck", *arguments, folder=tmp_path)
        assert everything_in(tmp_path) == before
        listed = run_program("potluck", *arguments, "--dry-run", folder=tmp_path)
    said = ended.stderr.decode()
    assert (ended.returncode, said.count("\n")) == (1, 1)
    assert said.startswith("potluck: results is in use by another experiment (process ")
    assert said.endswith("or stop it, or name another folder with --output\n")
    assert listed.returncode == 0  # reading is allowed


@pytest.mark.parametrize(("option", "code"), [("--dry-run", 0), ("--report-only", 1)])
def test_report_or_dry_run_of_an_experiment_creates_no_folder(
    option: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "miniature.toml").write_text(EXPERIMENT)
    arguments = ("experiment", "miniature.toml", "--output", "nosuch", option)
    ended = run_program("potluck", *arguments, folder=tmp_path)
    assert ended.returncode == code
    assert not (tmp_path / "nosuch").exists()
    if code:
        told = b"potluck: nosuch has no finished cell; run the experiment first\n"
        assert ended.stderr == told


def test_a_second_demo_in_a_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with hold(tmp_path / "here"):
        before = everything_in(tmp_path)
        ended = run_program("potluck", "demo", "--folder", "here", folder=tmp_path)
        assert everything_in(tmp_path) == before
    said = ended.stderr.decode()
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert said.startswith("potluck: here is in use by another demo (process ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "option",
    [("--hosts", "30"), ("--clients-per-round", "30"), ("--selector", "powr"), ("-o", "rounds=x")],
)
def test_demo_with_invalid_options_creates_no_folder(
    option: tuple[str, str], tmp_path: Path
) -> None:
    ended = run_program("potluck", "demo", "--folder", "here", *option, folder=tmp_path)
    assert (ended.returncode, ended.stderr.count(b"\n")) == (1, 1)
    assert not list(tmp_path.iterdir())


async def test_second_coordinator_on_a_state_directory_is_refused_for_any_database(
    tmp_path: Path,
) -> None:
    values = {
        "state_directory": tmp_path / "state",
        "tls": make_federation(tmp_path / "pki").coordinator,
    }
    other = f"sqlite:///{tmp_path / 'other.sqlite3'}"
    instruments = Instruments(MeasuredParty.COORDINATOR)
    async with Coordinator.opened(CoordinatorConfig(**values), instruments):
        with pytest.raises(ConfigurationError, match="is in use by another coordinator"):
            async with Coordinator.opened(CoordinatorConfig(**values, database=other), instruments):
                pass
    async with Coordinator.opened(CoordinatorConfig(**values, database=other), instruments):
        pass


def test_folder_lock_is_released_when_its_process_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_AND_WAIT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigurationError, match=f"another test .process {holder.pid}.; wait"):
            FolderLock(tmp_path, holder="test", remedy="wait")
        holder.kill()
    FolderLock(tmp_path, holder="test", remedy="wait").close()
