"""Work of a host on a device besides training: measuring, estimating and reporting."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from potluck.client.training.device import resolve_device
from potluck.client.training.own_training import OwnTraining
from potluck.client.training.task_training import LoadedTask, TrainingFiles
from potluck.client.training.triplet_estimate import (
    EstimateTerms,
    estimate_matrix,
)
from potluck.common.errors import ConfigurationError
from potluck.common.learning.evaluation import evaluate
from potluck.common.learning.heterogeneity import triplet
from potluck.common.learning.triplet import TripletSettings
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Task
from potluck.common.tasks.digits import ColoredDigits, Digits
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import write_tensors
from potluck.common.trainer import (
    Contribution,
    EvaluationSettings,
    Measures,
    Trainer,
    TrainerSettings,
    TrainingProgress,
)
from potluck.deploy.doctor.diagnosis import Verdict
from potluck.deploy.doctor.diagnosis import device as diagnosed
from potluck.rpc.v1 import coordinator_pb2 as rpc


def model_of(task: Task) -> nn.Module:
    torch.manual_seed(0)
    found: nn.Module = task.model()
    return found


def test_existing_device_is_found_and_a_missing_one_refused(device: str) -> None:
    assert resolve_device(device) == device
    with pytest.raises(ConfigurationError, match=r"this machine does not have the device cuda:99"):
        resolve_device("cuda:99")
    if device != "cpu":
        assert resolve_device("auto") == "cuda:0"


def test_doctor_names_the_device(device: str) -> None:
    found = diagnosed(device)
    assert found.verdict is Verdict.OK
    name = "as configured" if device == "cpu" else torch.cuda.get_device_name(device)
    assert name in found.found


def test_evaluation_on_the_device_equals_that_on_the_cpu(device: str) -> None:
    task = Digits(clients=6)
    examples = task.evaluation_data(None)
    assert examples is not None

    def counts(where: str) -> Any:
        return evaluate(model_of(task), examples, classes=10, groups=0, device=torch.device(where))

    found, expected = counts(device), counts("cpu")
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=0 if device == "cpu" else 1e-4)
    assert found.means()["accuracy"] == pytest.approx(expected.means()["accuracy"], abs=0.01)


def test_triplet_estimate_on_the_device_equals_that_on_the_cpu(device: str) -> None:
    task = ColoredDigits()
    data = task.client_data(ClientId("client-2"), None).train
    settings = TripletSettings(bias_steps=5, attribute_steps=50, learning_rate=0.1)

    def estimated(where: str) -> tuple[float, float, float]:
        model = model_of(task)
        weights = {name: array.copy() for name, array in state_arrays(model).items()}
        there = data.to(torch.device(where))  # like samples that stay on a device
        terms = EstimateTerms(settings=settings, seed=1, device=torch.device(where))
        found = estimate_matrix(model, weights, there, classes=2, terms=terms)
        return triplet(found.matrix)

    expected = estimated("cpu")
    assert estimated(device) == pytest.approx(expected, abs=0 if device == "cpu" else 0.05)
    assert estimated(device) == estimated(device)


# A task's own trainer


class Drawing(Trainer):
    """Trainer that adds random numbers from the device's own generator to the model."""

    measures: ClassVar = {}

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        with torch.no_grad():
            model.weight += torch.randn_like(model.weight)
        assert str(model.weight.device) == settings.device
        return Contribution(samples=1)

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        return {}


@dataclass(frozen=True, kw_only=True)
class Drawn(Task):
    """Task with the trainer `Drawing`."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def trainer(self) -> Trainer:
        return Drawing()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData[Any]:
        return ClientData(train=None)

    def evaluation_data(self, data: Path | None) -> None:
        return None


def test_custom_trainer_gets_the_device_and_seeded_generators(device: str, tmp_path: Path) -> None:
    loaded = LoadedTask("drawn", Drawn(), device, None)
    write_tensors(tmp_path / "model", state_arrays(nn.Linear(3, 2)))
    files = TrainingFiles(
        model=tmp_path / "model", update=tmp_path / "update", keep_at=tmp_path.with_name
    )

    def trained(seed: int) -> list[float]:
        work = rpc.Instruction(client_id="client-0", round=1, train=rpc.Train(seed=seed))
        OwnTraining(loaded, Drawing()).train(work, files, TrainingProgress())
        values: list[float] = loaded.model.weight.detach().cpu().flatten().tolist()
        return values

    torch.manual_seed(7)
    expected = torch.rand(1, device=device).item()
    torch.manual_seed(7)
    first = trained(1)
    assert torch.rand(1, device=device).item() == expected, (
        "as if nothing had been drawn in between"
    )
    assert trained(1) == first
    assert trained(2) != first


# In separate processes: deterministic kernels are set for a whole process

DETERMINISTIC = """
import hashlib, sys, torch
from torch import nn
from potluck.client.training.determinism import compute_deterministically
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.steps.loop import TrainingContext, train
from potluck.common.models.lenet import lenet5
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples
from potluck.common.tensors.model_arrays import state_arrays

compute_deterministically()
torch.set_num_threads(1)
device = torch.device(sys.argv[1])
generator = torch.Generator().manual_seed(0)
data = Examples(
    inputs=torch.randn(64, 3, 32, 32, generator=generator), labels=torch.arange(64) % 10
)
for _ in range(2):
    torch.manual_seed(1)
    model = lenet5()
    context = TrainingContext(classes=10, seed=3, round=1, device=device)
    train(model, data, CrossEntropy(), LocalTraining(learning_rate=0.05, batch_size=16), context)
    arrays = state_arrays(model)
    print(hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest())
"""


def printed(program: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_deterministic_training_on_the_device_is_reproducible(device: str) -> None:
    runs = [printed(DETERMINISTIC, device) for _ in range(1 if device == "cpu" else 2)]
    assert len({digest for run in runs for digest in run}) == 1


FIGURES = """
import sys
sys.path[:0] = sys.argv[1:]
from potluck.client.base.host_metrics import gpu_figures
for each in gpu_figures():
    print(each.number, each.memory_used, each.memory_size, each.utilisation)
"""
STAND_IN = """
from types import SimpleNamespace
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(number): return number
def nvmlDeviceGetMemoryInfo(device): return SimpleNamespace(used=3 << 30, total=8 << 30)
def nvmlDeviceGetUtilizationRates(device): return SimpleNamespace(gpu=50)
"""


def test_gpu_metrics_equal_those_of_the_driver(device: str, tmp_path: Path) -> None:
    """Without a GPU, a stand-in driver reports the metrics."""
    size = 8 << 30
    if device == "cpu":
        (tmp_path / "pynvml.py").write_text(STAND_IN)
    else:
        pytest.importorskip("pynvml", reason="the extra gpu (nvidia-ml-py) is not installed")
        size = torch.cuda.mem_get_info(device)[1]
    number, used, total, busy = printed(FIGURES, str(tmp_path))[:4]
    assert number == "0"
    assert 0 < int(used) < int(total)
    assert int(total) == pytest.approx(size, rel=0.1)
    assert 0 <= float(busy) <= 1
