"""The benchmark of selection with real federations, in a tiny tier."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from support.programs import run_program
from support.tiny_tier import TINY
from typer.testing import CliRunner

import leaderboard_page
from potluck.experiments.benchmark import tier as tiers
from potluck.experiments.benchmark.contestants import run_arms
from potluck.experiments.benchmark.leaderboard import leaderboard
from potluck.experiments.benchmark.standing import read_result, write_result
from potluck.experiments.commands.bench_command import app
from potluck.experiments.commands.grid_work import GridWork, RayChoice, run_work
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.results import CellResult, ResultsFolder


@pytest.mark.slow
def test_arm_of_a_tiny_tier_gets_a_row(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path / "bench")
    console = Console(file=io.StringIO())

    def run(cells: Sequence[Cell], purpose: str) -> Mapping[str, CellResult]:
        assert purpose == "results"  # an arm without a grid is not tuned
        work = GridWork(list(cells), folder, None, "cpu", 1)
        return run_work(work, RayChoice(None, gpus=0.0, apart=False), console).results

    with folder.opened():
        uniform, other = run_arms(TINY, ["dc-balanced"], None, run, data={})
    assert uniform.epsilon == {"skew": 0.0}
    assert other.epsilon == {"skew": 0.2}
    assert other.learns == {"profiles": ["label_counts"]}
    [cell] = uniform.cells
    assert cell.to_target is not None
    assert cell.to_target.bytes
    assert cell.to_target.client_seconds
    assert read_result(write_result(other, tmp_path), TINY) == other
    assert "| dc-balanced |" in leaderboard(TINY, [uniform, other])


@pytest.mark.slow
def test_selector_of_the_template_gets_a_tuned_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_program("potluck", "new", "selector", "my-choice", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    package, installed = tmp_path / "my-choice-selector", tmp_path / "installed"
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(installed)]
    subprocess.run([*pip, str(package)], check=True)
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)

    tuning = TINY.tuning.model_copy(update={"settings": 2})
    # No results of the full tier come with Potluck, so the baseline runs first.
    tier = TINY.model_copy(update={"name": "full", "tuning": tuning})
    monkeypatch.setattr(tiers, "tier_named", lambda name: tier)
    folder = tmp_path / "bench"
    choice = ["my-choice", "--tier", "full", "--grid", str(package / "grid.toml")]
    told = CliRunner().invoke(
        app, [*choice, "--output", str(folder), "--jobs", "2"], catch_exceptions=False
    )
    assert told.exit_code == 0, told.output
    assert "| **my-choice (my-choice-selector 0.1)** |" in told.output
    assert "my-choice was tuned with 2 settings: its own options; explored = " in told.output
    own = read_result(folder / "results" / "my-choice.json", tier)
    assert own.package == "my-choice-selector 0.1"
    assert own.tried[0] == {}
    assert len(own.tried) == 2
    assert read_result(folder / "results" / "uniform.json", tier).arm == "uniform"

    # The last step of docs/guides/add-to-the-leaderboard.md, with the baseline as published result.
    published = tmp_path / "published"
    (published / "full").mkdir(parents=True)
    shutil.copy(folder / "results" / "uniform.json", published / "full")
    monkeypatch.setattr(leaderboard_page, "tier_named", lambda name: tier)
    before = rows(leaderboard_page.tables("full", published))
    shutil.copy(folder / "results" / "my-choice.json", published / "full")
    after = rows(leaderboard_page.tables("full", published))
    assert before == ["uniform"]
    assert sorted(after) == ["my-choice (my-choice-selector 0.1)", "uniform"]


def rows(tables: str) -> list[str]:
    """Return the arms in a page's first table."""
    lines = tables.partition("\n\n")[0].splitlines()
    return [line.split("|")[1].strip() for line in lines[2:]]
