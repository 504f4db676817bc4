"""The package of docs/guides/writing-a-task.md is built, installed and used."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/guides/writing-a-task.md"

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


def written_files(page: str) -> dict[str, str]:
    """Return the page's code blocks that begin with a comment with their file's name."""
    blocks = re.findall(
        r"^```\w+\n(# (\S+\.(?:py|toml))\n.*?)^```$", page, re.DOTALL | re.MULTILINE
    )
    return {name: text for text, name in blocks}


@pytest.fixture(scope="module")
def installed_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("circle-task"), tmp_path_factory.mktemp("installed")
    files = written_files(PAGE.read_text(encoding="utf-8"))
    assert sorted(files) == ["circle_task.py", "pyproject.toml"]
    for name, text in files.items():
        (source / name).write_text(text, encoding="utf-8")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        "--target",
        str(target),
        str(source),
    ]
    subprocess.run(command, check=True)
    return target


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
