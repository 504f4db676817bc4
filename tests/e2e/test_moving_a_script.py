"""The scripts of docs/start/your-own-model.md run, their diffs are small, and the resulting tasks
train in one federation."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.federation import set_values
from support.profile_federation import profile_federation
from support.repository import ROOT

from potluck.rpc.v1 import operator_pb2

PAGE = ROOT / "docs/start/your-own-model.md"
MOST_CHANGED_LINES = 10
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

generator = np.random.default_rng(4)


def write_readings(file: Path) -> None:
    inputs = generator.normal(size=(200, 3))
    targets = inputs @ [1.0, -2.0, 0.5] + 0.3
    np.savetxt(file, np.column_stack([inputs, targets]), delimiter=",")


def write_reviews(file: Path) -> None:
    words = {0: ["bad", "dull", "poor", "weak"], 1: ["good", "great", "superb"]}
    rows = [f"{n % 2}\tthe film is {generator.choice(words[n % 2])}" for n in range(100)]
    file.write_text("\n".join(rows))


def write_images(file: Path) -> None:
    labels = np.zeros((32, 1, 16, 16), np.float32)
    for label, (y, x) in zip(labels, generator.integers(2, 8, (32, 2)), strict=True):
        label[0, y : y + 6, x : x + 6] = 1
    images = labels + generator.normal(0, 0.3, labels.shape).astype(np.float32)
    np.savez(file, images=images, labels=labels)


SCRIPTS: dict[str, tuple[str, str, Callable[[Path], None], str, str]] = {
    "loop.py": ("readings", ".csv", write_readings, "error", "mean error: 0."),
    "reviews.py": ("reviews", ".tsv", write_reviews, "accuracy", "eval_accuracy"),
    "module.py": ("temperatures", ".csv", write_readings, "error", "error"),
    "squares.py": ("squares", ".npz", write_images, "dice", "Dice: 0."),
}
"""By script: task, data file suffix, data writer, metric, and a part of its final output."""


def blocks(language: str) -> dict[str, str]:
    """Return the page's blocks in a language, by the file that their first line names."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return {re.split(r"[\s]+", text, maxsplit=2)[1]: text for text in found}


def changed_lines(diff: str) -> int:
    return len(re.findall(r"^[+-](?!\+\+|--)", diff, re.MULTILINE))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the scripts after the page's diffs, and with the page's
    pyproject.toml."""
    folder = tmp_path_factory.mktemp("scripts")
    scripts, diffs = blocks("python"), blocks("diff")
    assert set(scripts) == set(diffs) == set(SCRIPTS)
    for name, text in {**scripts, **blocks("toml")}.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, diff in diffs.items():
        assert 0 < changed_lines(diff) <= MOST_CHANGED_LINES, name
        apply = ["git", "apply", "-p0", "--whitespace=nowarn"]
        subprocess.run([*apply, "-"], cwd=folder, input=diff.encode(), check=True)
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("moved", [False, True])
def test_script_runs_before_and_after_the_move(
    name: str, moved: bool, package: Path, tmp_path: Path
) -> None:
    _, form, write, _, printed = SCRIPTS[name]
    write(tmp_path / f"data{form}")
    script = tmp_path / name
    script.write_text((package / name).read_text() if moved else blocks("python")[name])
    command = [sys.executable, "-W", "ignore", name, f"data{form}"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


@pytest.fixture(scope="module")
def installed(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target)]
    subprocess.run([*command, str(package)], check=True)
    return target


async def test_moved_scripts_train_in_a_federation(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    data = tmp_path / "data"
    for task, form, write, _, _ in SCRIPTS.values():
        (data / task).mkdir(parents=True)
        for client in range(4):
            write(data / task / f"client-{client}{form}")
            link = data / f"client-{client}{form}"
            link.unlink(missing_ok=True)
            link.symlink_to(data / task / link.name)
    async with profile_federation(
        tmp_path,
        task="readings",
        selector="uniform",
        clients=4,
        count=4,
        rounds=3,
        start_hosts=False,
        disclosure={"held_out_counts": True},
    ) as federation:
        for path in federation.files.hosts:
            set_values(path, {"data_directory": str(data)})
        await federation.start_hosts()
        settings, digest = ("", ""), ""
        for task, _, _, measure, _ in SCRIPTS.values():
            settings = (f"task.name={task}", "training={epochs = 2}")
            run = await federation.start_run(*settings)
            digest = await federation.finished(run)
            history = await federation.history(run)
            found = [
                entry.metrics.accuracy if measure == "accuracy" else entry.metrics.others[measure]
                for entry in history
            ]
            better = (
                found[-1] - found[0] if measure in ("dice", "accuracy") else found[0] - found[-1]
            )
            assert better > 0, (task, found)
            assert all(
                member.state == operator_pb2.MEMBER_STATE_INCLUDED
                for entry in history
                for member in entry.members
            )
        again = await federation.finished(await federation.start_run(*settings))
        assert again == digest  # of the last script, which has random transforms
