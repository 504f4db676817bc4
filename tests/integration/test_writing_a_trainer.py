"""The package of docs/guides/writing-a-trainer.md is built, installed and used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.federation import set_values
from support.guide_packages import install_package_of
from support.profile_federation import profile_federation

from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readings")
    files = ["pyproject.toml", "readings_task.py"]
    return install_package_of("writing-a-trainer.md", folder, files=files)


def write_readings(folder: Path, clients: int) -> None:
    folder.mkdir()
    generator = np.random.default_rng(1)
    for client in range(clients):
        inputs = generator.normal(size=(200, 3))
        target = inputs @ [1.0, -2.0, 0.5] + 0.3
        table = np.column_stack([inputs, target])
        np.savetxt(folder / f"client-{client}.csv", table, delimiter=",")


async def test_guide_package_installs_and_its_trainer_learns(
    installed_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed_package)
    monkeypatch.setenv("PYTHONPATH", str(installed_package))
    write_readings(tmp_path / "data", 4)
    async with profile_federation(
        tmp_path,
        task="temperature",
        selector="uniform",
        clients=4,
        count=4,
        rounds=5,
        assignments=["training.steps=1"],
        start_hosts=False,
    ) as federation:
        for path in federation.files.hosts:
            set_values(path, {"data_directory": str(tmp_path / "data")})
        await federation.start_hosts()
        run = await federation.start_run()
        await federation.finished(run)
        status, history = await federation.status(run), await federation.history(run)
    declared = {each.name: each for each in status.measures}
    assert list(declared) == [
        "absolute_error",
        "loss",
        "training_absolute_error",
        "training_loss",
    ]
    assert declared["absolute_error"].unit == "°C"
    assert not declared["absolute_error"].higher_is_better
    errors = [entry.metrics.others["absolute_error"] for entry in history]
    assert errors[-1] < 0.5 * errors[0]
    assert all(entry.metrics.others["training_loss"] > 0 for entry in history)
    assert all(entry.metrics.HasField("loss") for entry in history)
    assert all(
        member.state == operator_pb2.MEMBER_STATE_INCLUDED and member.samples == 160
        for entry in history
        for member in entry.members
    )
