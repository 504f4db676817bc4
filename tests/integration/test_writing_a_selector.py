"""The package of docs/guides/writing-a-selector.md is built, installed and used."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.guide_packages import GUIDES, install_package_of
from support.profile_federation import profile_federation

PROGRAM = """
import sys, typer
from potluck.common.process.command_line import run_command_line
from potluck.deploy.commands.select_command import select
app = typer.Typer()
app.command()(select)
run_command_line(app, program="potluck")
"""

PROFILES = {
    "classes": 2,
    "clients": [
        {"id": "a", "label_counts": [90, 10]},
        {"id": "b", "label_counts": [50, 50]},
        {"id": "c", "label_counts": [100, 0]},
        {"id": "d", "label_counts": [80, 20]},
        {"id": "late"},
    ],
}


@pytest.fixture(scope="module")
def installed_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rare-first")
    files = ["hardest_first.py", "pyproject.toml", "rare_first.py"]
    return install_package_of("writing-a-selector.md", folder, files=files)


def select(
    path: Path, profiles: Path, *arguments: str, selector: str = "rare-first"
) -> subprocess.CompletedProcess[str]:
    """Run `potluck select` in a process that also finds packages in `path`."""
    command = [sys.executable, "-c", PROGRAM, "--selector", selector, "--profiles"]
    return subprocess.run(
        [*command, str(profiles), *arguments],
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps(PROFILES))
    return path


def test_guide_package_installs_and_selects(installed_package: Path, profiles: Path) -> None:
    options = ("--rounds", "3", "--clients-per-round", "2", "-o", "rest=1", "--json")
    finished = select(installed_package, profiles, *options)
    assert finished.returncode == 0, finished.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in finished.stdout.splitlines()]
    assert lines[0] == {
        "round": 1,
        "cohort": ["b", "d"],
        "reasons": {"b": "50% of class 1", "d": "20% of class 1"},
    }
    assert lines[1]["cohort"][0] == "a"  # b and d pause for a round
    assert lines[1]["cohort"][1] in ("c", "late")  # tied, so drawn at random
    assert lines[2]["cohort"] == ["b", "d"]


def test_class_without_clients_is_not_the_rarest(installed_package: Path, tmp_path: Path) -> None:
    """The profiles and the result are the same as on the page."""
    page = (GUIDES / "writing-a-selector.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    [shown] = re.findall(r"^round  client  why\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    profiles = tmp_path / "profiles.json"
    profiles.write_text(example)
    options = ("--rounds", "3", "--clients-per-round", "2", "-o", "rest=1")
    finished = select(installed_package, profiles, *options)
    assert finished.returncode == 0, finished.stderr
    lines = [line.rstrip() for line in finished.stdout.splitlines()]
    assert lines[1:] == shown.splitlines()


def test_invalid_or_unknown_selector_option_is_refused(
    installed_package: Path, profiles: Path
) -> None:
    refused = select(installed_package, profiles, "--clients-per-round", "2", "-o", "rest=-1")
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert "selector rare-first: option 'rest' is -1; it must be greater than or equal to 0" in line
    unknown = select(installed_package, profiles, "--clients-per-round", "2", "-o", "nap=1")
    assert unknown.returncode == 1
    assert "its options: rest" in unknown.stderr


def test_selector_that_asks_clients_cannot_select_offline(
    installed_package: Path, profiles: Path
) -> None:
    refused = select(
        installed_package, profiles, "--clients-per-round", "2", selector="hardest-first"
    )
    assert refused.returncode == 1
    assert "asks 5 clients 'loss' before it chooses" in refused.stderr


async def test_selector_that_asks_clients_selects_in_a_federation(
    installed_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed_package), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(installed_package))
    async with profile_federation(tmp_path, selector="hardest-first", rounds=1) as federation:
        run_id = await federation.start_run()
        await federation.finished(run_id)
        [committed] = await federation.history(run_id)
    losses = [float(member.reason.removeprefix("loss ")) for member in committed.members]
    assert len(losses) == 2
    assert losses == sorted(losses, reverse=True)


def test_error_without_the_package_lists_installed_selectors(
    tmp_path: Path, profiles: Path
) -> None:
    finished = select(tmp_path, profiles, "--clients-per-round", "2")
    assert finished.returncode == 1
    assert "'rare-first' is not installed; installed: afl, clustered-sampling" in finished.stderr
