"""Too little memory on a device: reported as such, and retried if the run allows it.

The test raises the error where torch raises it, since it needs no GPU."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import Tensor, nn

from potluck.client.base.worker import Worker
from potluck.client.config import ClientConfig, example_config
from potluck.client.objective import Batch, LocalContext
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.steps.loop import TrainingContext, TrainingResult, train
from potluck.client.training.steps.smaller_batches import smaller, within_memory
from potluck.common.errors import ConfigurationError, DeviceMemoryError, TrainingError
from potluck.common.settings.configuration import parse
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples
from potluck.common.tensors.model_arrays import state_arrays


class Hungry(CrossEntropy):
    """Objective that runs out of memory above `most` samples at once."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.seen: list[int] = []

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        self.seen.append(len(logits))
        if len(logits) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().loss(logits, batch, local)


def attempt_with(objective: Hungry) -> tuple[nn.Module, TrainingResult, LocalTraining]:
    torch.manual_seed(1)
    start = nn.Linear(4, 2)
    begin = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    labels = torch.arange(40) % 2
    data = Examples(inputs=torch.randn(40, 4) + labels[:, None], labels=labels)

    def attempt(settings: LocalTraining) -> TrainingResult:
        start.load_state_dict(begin)
        return train(
            start,
            data,
            objective,
            settings,
            TrainingContext(classes=2, seed=3, round=1, device=torch.device("cpu")),
        )

    settings = LocalTraining(batch_size=32, smallest_batch_size=4)
    result, used = within_memory(attempt, settings)
    return start, result, used


def test_training_with_halved_batches_equals_one_started_with_them() -> None:
    hungry = Hungry(10)
    model, result, used = attempt_with(hungry)
    assert used.batch_size == 8
    assert hungry.seen == [32, 16, 8, 8, 8, 8, 8]
    assert result.steps == used.planned_steps(40) == 5
    again, _, _ = attempt_with(Hungry(8))
    for name, array in state_arrays(model).items():
        assert (array == state_arrays(again)[name]).all()


def test_training_too_large_for_the_smallest_batch_fails_with_a_remedy() -> None:
    with pytest.raises(DeviceMemoryError, match=r"with batches of 4; lower training\.batch_size"):
        attempt_with(Hungry(3))


def test_batch_size_is_not_reduced_unless_the_run_allows_it() -> None:
    assert smaller(LocalTraining(batch_size=32)) is None
    assert smaller(LocalTraining(batch_size=1, smallest_batch_size=1)) is None


def test_exhausted_device_memory_has_its_own_failure_reason() -> None:
    assert DeviceMemoryError.reason == "DEVICE_MEMORY_EXHAUSTED"
    assert DeviceMemoryError.reason != TrainingError.reason


async def test_devices_run_in_parallel_in_separate_threads() -> None:
    both = threading.Barrier(2)
    worker = Worker(lambda: "cuda:0", lambda: "cuda:1")

    def meet(bench: str) -> tuple[str, int]:
        both.wait(60)
        return bench, threading.get_ident()

    met = await asyncio.gather(worker.run(meet), worker.run(meet))
    again = await asyncio.gather(worker.run(meet), worker.run(meet))
    assert {bench for bench, _ in met} == {"cuda:0", "cuda:1"}
    assert set(met) == set(again)
    worker.close()


@pytest.mark.parametrize("device", ["cuda:0,cuda:0", "cuda:0,cpu", "cuda", "auto,cuda:1", ""])
def test_invalid_device_settings_are_refused(device: str) -> None:
    text = example_config().replace('device = "auto"', f'device = "{device}"')
    with pytest.raises(ConfigurationError, match=r"must be auto, cpu|name each GPU only once"):
        parse(ClientConfig, text, source="host.toml")
