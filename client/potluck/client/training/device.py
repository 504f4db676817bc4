"""Training and evaluation on this host's device.

All code here runs in one worker thread. Torch takes seconds to import. So it is imported in that
thread, while the host connects, and only if a task needs it.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.client.base.availability_plan import Forecast, always
from potluck.client.question import BoundedSums, Question
from potluck.client.training.local_update import (
    Trained,
    check_training,
    make_question,
    train_update,
    train_updates,
)
from potluck.client.training.own_training import OwnTraining
from potluck.client.training.plugin_options import model_table_of, options_of
from potluck.client.training.task_training import (
    ClientFiles,
    GroupMember,
    LoadedTask,
    TaskTraining,
    TrainingFiles,
    UnfitForLanesError,
)
from potluck.common.disclosure import Parameters, canonical_json
from potluck.common.errors import ConfigurationError, PotluckError, ProtocolError, TrainingError
from potluck.common.learning.measures import MeasureSums, own_trainer
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.learning.task_loading import make_task
from potluck.common.names import ClientId
from potluck.common.settings.plugins import MODEL_MODULES
from potluck.common.signal import (
    Counts,
    EstimatedMatrix,
    SignalContext,
    read_payload,
    signal_named,
)
from potluck.common.tensors.layout import LENGTH_BYTES, Layout, parse_header
from potluck.common.trainer import TrainingProgress
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:
    from potluck.client.training.processes.worker_count import TrainingMemory


# Tasks that stay loaded ---------------------------------------------------------------------------

_TASKS_KEPT = 4


class LoadedTasks:
    """The most recently used tasks on a device: "cpu" or "cuda:N"."""

    def __init__(
        self,
        device: str,
        data_directory: Path | None,
        model_modules: Sequence[str] = MODEL_MODULES,
        forecast: Forecast = always,
        choices: Path | None = None,
        sharing: int = 1,
    ) -> None:
        """`model_modules`: modules in which models named by a run file are looked up. `forecast`:
        function that returns the chance that a client is available. `choices`, `sharing`: see
        `LoadedTask`."""
        self._choices, self._sharing = choices, sharing
        self._device, self._data_directory = device, data_directory
        self._model_modules, self._forecast = model_modules, forecast
        self._loaded: OrderedDict[tuple[str, str, str], TaskTraining] = OrderedDict()

    def of(self, plugin: rpc.Plugin) -> TaskTraining:
        """Return a task; load it if needed. Raises PluginError, ConfigurationError, LayoutError."""
        key = (plugin.name, plugin.options_json, plugin.model_json)
        loaded = self._loaded.get(key)
        if loaded is None:
            loaded = self._loaded[key] = self._load(plugin)
        self._loaded.move_to_end(key)
        while len(self._loaded) > _TASKS_KEPT:
            self._loaded.popitem(last=False)
        return loaded

    def _load(self, plugin: rpc.Plugin) -> TaskTraining:
        table = model_table_of(plugin)
        task = make_task(
            plugin.name,
            options_of(plugin),
            model=None if table is None else table.maker,
            model_modules=self._model_modules,
        )
        trainer = own_trainer(task, plugin.name)
        loaded = LoadedTask(
            plugin.name,
            task,
            self._device,
            self._data_directory,
            table,
            self._forecast,
            self._choices,
            self._sharing,
        )
        if trainer is not None:
            return OwnTraining(loaded, trainer)
        from potluck.client.training.classification import Classification  # imports torch

        return Classification(loaded)


# The device ---------------------------------------------------------------------------------------


class TrainingDevice:
    """A device on which tasks, models and clients' data stay loaded. Used by one thread."""

    def __init__(
        self,
        *,
        device: str,
        threads: int,
        data_directory: Path | None,
        model_modules: Sequence[str] = MODEL_MODULES,
        forecast: Forecast = always,
        choices: Path | None = None,
        sharing: int = 1,
    ) -> None:
        """Call this in the thread that will work: torch's number of threads is set for it.

        device: "cpu" or "cuda:N". `model_modules`: modules in which models named by a run file are
        looked up. `forecast`: function that returns the chance that a client is available.
        `choices`: folder with measured choices, such as training clients together or one by one.
        `sharing`: number of processes that share the device. Without torch, only tasks with
        trainers that don't need torch can be trained.
        """
        if has_torch():
            import torch

            import potluck.client.training.classification  # noqa: F401  better now than later

            torch.set_num_threads(threads)
        self._terms = (device, data_directory, model_modules, forecast, choices, sharing)
        self._tasks = LoadedTasks(*self._terms)

    def restart(self) -> None:
        """Forget all tasks, models and data that are loaded."""
        self._tasks = LoadedTasks(*self._terms)

    def layout(self, plugin: rpc.Plugin) -> Layout:
        """Return the layout of a task's model. Raises PluginError, or LayoutError."""
        return self._tasks.of(plugin).loaded.layout

    def train(
        self,
        instruction: rpc.Instruction,
        files: TrainingFiles,
        *,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> Trained:
        """Train a client and write its update; see `train_update`."""
        training = self._tasks.of(instruction.train.task)
        return train_update(training, instruction, files, progress=progress, cancelled=cancelled)

    def train_together(
        self, members: Sequence[GroupMember], companions: Sequence[ClientId]
    ) -> Sequence[Trained | PotluckError | UnfitForLanesError]:
        """Train clients in one batched step and write their updates; see `train_updates`."""
        training = self._tasks.of(members[0].instruction.train.task)
        return train_updates(training, members, companions)

    def memory_of(
        self,
        instruction: rpc.Instruction,
        files: ClientFiles,
        *,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> TrainingMemory | None:
        """Measure the GPU memory of a training; see `TaskTraining`. Raises as `train` does."""
        training = self._tasks.of(instruction.train.task)
        return training.memory_of(instruction, files, TrainingProgress(progress, cancelled))

    def check(self, work: rpc.Train, layout: bytes) -> None:
        """Check that the training `work` could begin. layout: the model's file header, or empty.

        Raises PluginError, ConfigurationError, LayoutError, or ProtocolVersionError.
        """
        training = self._tasks.of(work.task)
        if layout:
            expected = parse_header(layout[LENGTH_BYTES:])
            loaded = training.loaded.layout
            loaded.check_matches(expected, what="task's", whose="run's model")
        check_training(training, work)

    def evaluate(
        self,
        instruction: rpc.Instruction,
        files: ClientFiles,
        *,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> EvaluationCounts | MeasureSums:
        """Evaluate a model on a client's held-out samples; return counts, or sums of metrics.

        Raises PluginError, ConfigurationError, LayoutError, TrainingError, StorageError, and
        RoundClosedError when cancelled.
        """
        training = self._tasks.of(instruction.evaluate.task)
        return training.evaluate(instruction, files, TrainingProgress(progress, cancelled))

    def question(self, work: rpc.Question) -> Question:
        """Create the question in `work`. Raises PluginError if this host does not know it."""
        return make_question(work)

    def answer(
        self,
        question: Question,
        instruction: rpc.Instruction,
        files: ClientFiles | None,
        *,
        cancelled: Callable[[], bool],
    ) -> Mapping[str, float]:
        """Return a client's answer to a question. files: files of the model, if it is needed.

        Raises PluginError, ConfigurationError, LayoutError, TrainingError, StorageError, and
        RoundClosedError when cancelled.
        """
        training = self._tasks.of(instruction.question.task)
        values = question.answer(training.question_context(instruction, cancelled, files))
        return {name: float(value) for name, value in values.items()}

    def bounded_sums(
        self,
        question: Question,
        instruction: rpc.Instruction,
        files: ClientFiles | None,
        *,
        cancelled: Callable[[], bool],
    ) -> tuple[BoundedSums, int]:
        """Return the sums that answer a question after noise, and the client's number of samples.

        Raises what `answer` raises.
        """
        work = instruction.question
        training = self._tasks.of(work.task)
        context = training.question_context(instruction, cancelled, files)
        context.require_examples(work.kind)
        return question.bounded_sums(context, work.privacy.answer_clip), len(context.data.train)

    def samples(self, work: rpc.Train, client_id: ClientId) -> int:
        """Return a client's number of training samples, after the checks of its training.

        Raises PluginError, TrainingError, and what `TaskTraining.check` raises."""
        found = self._tasks.of(work.task)
        found.check(work)
        return found.samples(client_id)

    def label_counts(self, plugin: rpc.Plugin, client_id: ClientId) -> list[int]:
        """Return a client's training samples per class. Raises PluginError, TrainingError."""
        return self._tasks.of(plugin).label_counts(client_id)

    def disclosed(
        self,
        work: rpc.Disclose,
        parameters: Parameters,
        client_id: ClientId,
        *,
        noisy: Callable[[Counts], Counts],
        model: Path | None,
        cancelled: Callable[[], bool],
    ) -> dict[str, Any]:
        """Return the payload of a client's signal, after the checks that the coordinator makes too.

        model: file of the pre-trained model, for a signal that needs one.

        Raises PluginError, LayoutError, TrainingError, and RoundClosedError when cancelled.
        """
        found, name = self._tasks.of(work.task), work.signal
        task = found.loaded.task

        def estimated_matrix() -> EstimatedMatrix:
            from potluck.client.training.classification import Classification

            if model is None or not isinstance(found, Classification):
                raise TrainingError(
                    f"signal '{name}' estimates a matrix, but has no model; set `needs_model` of "
                    "the signal"
                )
            seed = _own_seed(client_id, parameters.model or "")
            return found.estimated_matrix(
                parameters, client_id, seed=seed, model=model, cancelled=cancelled
            )

        payload = dict(
            signal_named(name).measure(
                SignalContext(
                    client=client_id,
                    data=partial(found.client_data, client_id),
                    task=work.task.name,
                    classes=task.classes,
                    groups=task.groups,
                    trains_by_itself=found.trains_by_itself,
                    parameters=parameters,
                    label_counts=partial(self.label_counts, work.task, client_id),
                    estimated_matrix=estimated_matrix,
                    noisy=noisy,
                )
            )
        )
        try:
            read_payload(name, parameters, canonical_json(payload), classes=task.classes)
        except (ProtocolError, TypeError, ValueError) as error:
            raise TrainingError(f"the payload of signal '{name}' is not valid: {error}") from error
        return payload


def has_torch() -> bool:
    """Return True if torch is installed; hosts whose trainers don't use torch may lack it."""
    return importlib.util.find_spec("torch") is not None


def _own_seed(client_id: ClientId, model: str) -> int:
    """Return the seed of a client's estimate.

    The coordinator can't choose the seed, so it can't get and compare estimates with several seeds.
    """
    return int.from_bytes(hashlib.sha256(f"{client_id}/{model}".encode()).digest()[:8], "big") >> 1


def resolve_device(device: str) -> str:
    """Resolve auto, cpu or cuda:N to "cpu" or "cuda:N".

    Raises ConfigurationError if this machine does not have the device.
    """
    if device == "cpu" or not has_torch():
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda:0" if count else "cpu"
    if int(device.removeprefix("cuda:")) >= count:
        choices = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
        raise ConfigurationError(
            f"this machine does not have the device {device}; choose one of: {choices}",
            device=device,
        )
    return device


def described_devices(devices: str) -> str:
    """Return the devices for a log, with the names of GPUs: cuda:0 (NVIDIA H100)."""
    if "cuda" not in devices:
        return devices
    import torch

    numbers = [int(each.removeprefix("cuda:")) for each in devices.split(",") if each != "cpu"]
    names = dict.fromkeys(torch.cuda.get_device_name(number) for number in numbers)
    return f"{devices} ({', '.join(names)})"
