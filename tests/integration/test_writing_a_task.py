"""The package of docs/guides/writing-a-task.md is built, installed and used."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.guide_packages import install_package_of

PROGRAM = """
import numpy as np, torch
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.steps.loop import TrainingContext, train
from potluck.common.learning.evaluation import evaluate
from potluck.common.tensors.model_arrays import load_arrays, state_arrays
from potluck.common.names import ClientId
from potluck.common.settings.plugins import TASKS, create, installed
from potluck.common.task import Task
from potluck.common.learning.training import training_for

assert {"circle", "digits"} <= set(installed(TASKS))
torch.set_num_threads(1)
torch.manual_seed(0)
task = create(Task, "circle", {"clients": 4})
assert isinstance(task, Task)
settings = training_for(task, {}, source="test")
model, cpu = task.model(), torch.device("cpu")
weights = {name: array.copy() for name, array in state_arrays(model).items()}
for number in range(1, 6):
    updates = []
    for client in range(4):
        load_arrays(model, weights)
        data = task.client_data(ClientId(f"client-{client}"), None).train
        context = TrainingContext(classes=2, seed=client, round=number, device=cpu)
        train(model, data, CrossEntropy(), settings, context)
        updates.append({name: array.copy() for name, array in state_arrays(model).items()})
    weights = {name: np.mean([u[name] for u in updates], axis=0) for name in weights}
load_arrays(model, weights)
counts = evaluate(model, task.evaluation_data(None), classes=2, groups=0, device=cpu)
print(counts.metrics().accuracy)
"""


@pytest.fixture(scope="module")
def installed_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("circle-task")
    files = ["circle_task.py", "pyproject.toml"]
    return install_package_of("writing-a-task.md", folder, files=files)


def run_python(program: str, path: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(path)}
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_guide_package_installs_and_its_task_learns(installed_package: Path) -> None:
    assert float(run_python(PROGRAM, installed_package)) > 0.9


def test_invalid_task_option_is_refused(installed_package: Path) -> None:
    program = (
        "from potluck.common.settings.plugins import create\n"
        "from potluck.common.task import Task\n"
        "try:\n    create(Task, 'circle', {'samples': 2.5})\n"
        "except Exception as error:\n    print(error)\n"
    )
    [line] = run_python(program, installed_package).splitlines()
    assert line == "task circle: option 'samples' is 2.5; it must be a whole number"


def test_error_without_the_package_lists_installed_tasks(tmp_path: Path) -> None:
    program = (
        "from potluck.common.settings.plugins import create\n"
        "from potluck.common.task import Task\n"
        "try:\n    create(Task, 'circle', {})\n"
        "except Exception as error:\n    print(error)\n"
    )
    printed = run_python(program, tmp_path)
    assert re.match(r"potluck.tasks: 'circle' is not installed; installed: .*digits", printed)
