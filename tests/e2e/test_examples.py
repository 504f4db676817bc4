"""Each example runs as its README says: installed, with two hosts, over real gRPC."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from support.examples import EXAMPLES, Example, carried_out, installed, link_libraries
from support.repository import ROOT

from potluck.deploy.local.demo_files import reserved_port
from potluck.experiments.tasks.heart import HOSPITALS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def shown(measure: str, said: str) -> list[float]:
    """Return the values of a metric that `potluck watch` printed, by round."""
    return [float(value) for value in re.findall(rf"  {measure} ([\d.]+) ", said)]


async def test_regression_example_reduces_its_error(tmp_path: Path) -> None:
    with reserved_port() as port:
        said = await carried_out(installed("regression", tmp_path), port)
    errors = shown("mean error", said)
    assert "6 of 6 rounds committed" in said
    assert len(errors) == 6
    assert errors[-1] < 0.5 * errors[0]


async def test_private_training_example_learns_and_charges_each_round(tmp_path: Path) -> None:
    example = installed("private-training", tmp_path)
    with reserved_port() as port:
        said = await carried_out(example, port)
    [spent] = example.blocks("privacy")
    assert "6 of 6 rounds committed" in said
    assert shown("accuracy", said)[-1] > 50
    asked = await example.done(spent)
    assert "6 trainings requested, 6 charged, 6 updates sent, 0 trainings refused" in asked


async def test_four_hospitals_example_prints_the_documented_comparison(tmp_path: Path) -> None:
    folder = tmp_path / "four-hospitals"
    shutil.copytree(EXAMPLES / "four-hospitals", folder)
    example = Example(folder=folder, environment=Path(sys.prefix))
    [run] = example.blocks("run")
    said = await example.done(f"{run.rstrip()} --rounds 4")
    for network in ("logistic", "perceptron"):
        _, _, after = said.partition(f"discloses for {network}\n")
        disclosed, _, after = after.partition(f"Choices for {network}\n")
        choices, _, after = after.partition(f"Accuracy of {network} ")
        accuracies = after.split("\n\n")[0].splitlines()[2:]
        assert disclosed.count("label counts with noise") == 4
        reason = r"[a-z]+ \((drawn uniformly|paused longest|entropy [+-]\d\.\d\d bit)\)"
        found = re.findall(rf"  round  (\d)  {reason}, {reason}\n", choices)
        assert [number for number, *_ in found] == ["1", "2", "3", "4"]
        assert [line.split()[0] for line in accuracies] == list(HOSPITALS)
        federated, alone, pooled, _ = np.array([line.split()[2:] for line in accuracies], float).T
        assert min(federated.mean(), alone.mean(), pooled.mean()) > 60


async def test_the_segmentation_example_improves_its_dice_score(tmp_path: Path) -> None:
    with reserved_port() as port:
        said = await carried_out(installed("segmentation", tmp_path), port)
    found, losses = shown("Dice", said), shown("training Dice loss", said)
    assert "6 of 6 rounds committed" in said
    assert len(found) == len(losses) == 6
    assert found[-1] > 40 > found[0]
    assert losses[-1] < losses[0]
    assert (tmp_path / "segmentation" / "report.png").read_bytes().startswith(b"\x89PNG")


async def test_scikit_learn_example_trains_on_hosts_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = installed("scikit-learn", tmp_path)
    [environment], [install] = map(example.blocks, ("environment", "install-host"))
    await example.done(environment)
    link_libraries(example.folder / "host", without=("torch", "potluck"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip may install only what is linked
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "false")
    await example.done("unset PYTHONPATH\n" + install.replace("../..", str(ROOT)))
    there = "import importlib.util, potluck.client; print(importlib.util.find_spec('torch'))"
    assert await example.done(f'host/bin/python -c "{there}"') == "None\n"
    with reserved_port() as port:
        said = await carried_out(example, port)
    asked = await example.done("host/bin/potluck-client disclosures --config host-0.toml")
    assert "8 of 8 rounds committed" in said
    assert shown("accuracy", said)[-1] > 80
    assert "loss" in asked  # the selector's question, answered without torch
