"""Training and evaluation on this host's device. Everything here runs in one worker thread.

Importing this module imports torch, which takes seconds: the agent does it in that thread, while
the host connects.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from potluck.client.correction import LocalCorrection
from potluck.client.disclosure.masked_updates import MASKED, Differences, differences
from potluck.client.objective import Objective, proximal_weight
from potluck.client.question import Question, QuestionContext
from potluck.client.training.auxiliary_files import (
    ReceivedAuxiliaries,
    corrected,
    sendable,
    write_kept,
)
from potluck.client.training.device_samples import DeviceSamples
from potluck.client.training.loop import Corrected, TrainingResult, train
from potluck.client.training.optimizers import LocalOptimizer, make_optimizer
from potluck.client.training.quotas import within_quotas
from potluck.client.training.signals import interaction_matrix, label_counts
from potluck.client.training.smaller_batches import within_memory
from potluck.client.training.squared_losses import UTILITY, SquaredLosses, utility
from potluck.client.training.triplet_estimate import LocalPrivacy, estimate_triplet
from potluck.client.training.update_encoding import encoding_of, write_update
from potluck.client.training.validation import validation_split
from potluck.common.disclosure import Parameters
from potluck.common.errors import (
    ConfigurationError,
    ProtocolVersionError,
    RoundClosedError,
    TrainingError,
)
from potluck.common.learning.evaluation import evaluate
from potluck.common.learning.local_steps import normalizer
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.learning.task_checks import check_client_data, check_finite
from potluck.common.learning.task_loading import make_task
from potluck.common.learning.training import LocalTraining, training_for
from potluck.common.learning.triplet import TripletSettings
from potluck.common.learning.update_report import UpdateReport
from potluck.common.names import ClientId
from potluck.common.settings import plugins
from potluck.common.settings.plugins import MODEL_MODULES
from potluck.common.task import ClientData, Examples, Task
from potluck.common.tensors.layout import LENGTH_BYTES, Layout, parse_header
from potluck.common.tensors.model_arrays import buffer_names, load_arrays, state_arrays
from potluck.common.tensors.tensor_files import FileDigest, open_tensors
from potluck.rpc.v1 import coordinator_pb2 as rpc

_TASKS_KEPT = 4
_CLIENTS_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class Trained:
    """An update that has been written, or one that is still to be masked.

    mu: weight of the objective's proximal term. kept: whether something was written to be kept.
    root_mean_square_loss: of the first pass, where it is to be reported. simulated_seconds: what
    the training took on the run's virtual clock, if it has one.
    """

    file: FileDigest | None
    result: TrainingResult
    settings: LocalTraining
    mu: float
    kept: bool
    differences: Differences | None = None
    root_mean_square_loss: float | None = None
    simulated_seconds: float | None = None

    def report(self, disclosed_samples: int, round_number: int) -> UpdateReport:
        """What is said of the training, where so many samples are disclosed for the client."""
        steps, simulated = self.settings.planned_steps(disclosed_samples), self.simulated_seconds
        disclosed = {
            "samples": disclosed_samples,
            "steps": steps,
            "seconds": self.result.seconds if simulated is None else simulated,
            "normalizer": self.normalizer(steps, round_number),
            "reports": self._reports(disclosed_samples),
        }
        return UpdateReport(**(self.result.values() | disclosed))

    def _reports(self, disclosed_samples: int) -> dict[str, float]:
        """The numbers asked for."""
        if self.root_mean_square_loss is None or not math.isfinite(self.root_mean_square_loss):
            return {}
        met = min(disclosed_samples, self.result.steps * self.settings.batch_size)
        return {UTILITY: utility(met, self.root_mean_square_loss)}

    def normalizer(self, steps: int, round_number: int) -> float:
        """What so many steps of this training amount to."""
        if steps == self.result.steps:
            return self.result.normalizer
        return normalizer(self.settings, steps, round_number=round_number, mu=self.mu)


@dataclass(kw_only=True)
class _LoadedTask:
    """A task with what is reused from one client and round to the next."""

    name: str
    task: Task
    model: nn.Module
    layout: Layout
    data: OrderedDict[ClientId, ClientData]
    on_device: DeviceSamples | None = None
    _settings: LocalTraining | None = None
    _optimizer: LocalOptimizer | None = None

    def optimizer(self, settings: LocalTraining) -> LocalOptimizer:
        """The optimiser of the last training, if it was one with these settings; else a new one."""
        if self._optimizer is None or self._settings != settings:
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            self._optimizer = make_optimizer(parameters, settings, round_number=1)
            self._settings = settings
        return self._optimizer


class TrainingDevice:
    """The device with tasks, models and clients' data that stay loaded. Used by one thread."""

    def __init__(
        self,
        *,
        device: str,
        threads: int,
        data_directory: Path | None,
        model_modules: Sequence[str] = MODEL_MODULES,
    ) -> None:
        """Must be called in the thread that works: the number of threads is set for that one.

        `model_modules`: where models that a run file names are looked for.
        """
        torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._data_directory = data_directory
        self._model_modules = model_modules
        self._tasks: OrderedDict[tuple[str, str, str], _LoadedTask] = OrderedDict()

    def layout(self, plugin: rpc.Plugin) -> Layout:
        """The layout of a task's model. Raises PluginError, or LayoutError."""
        return self._load(plugin).layout

    def train(
        self,
        work: rpc.Train,
        *,
        client_id: ClientId,
        round_number: int,
        model: Path,
        update: Path,
        auxiliaries: ReceivedAuxiliaries | None = None,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
        spare: Callable[[], Path | None] = lambda: None,
    ) -> Trained:
        """Train from the file `model` and write the update to the file `update`.

        One that is to be masked is returned instead, as differences from the model.
        `auxiliaries`: what the strategy sent beside the model, where it did.
        `spare`: gives a file to be written over, if there is one.

        Raises PluginError, ConfigurationError, LayoutError, NotFiniteError, ProtocolError,
        TrainingError, StorageError, and RoundClosedError when cancelled.
        """
        encoding = None if work.encoding == MASKED else encoding_of(work.encoding)
        loaded = self._load(work.task)
        objective: Objective = plugins.create(
            plugins.OBJECTIVES, work.objective.name, _options(work.objective)
        )
        settings = training_for(
            loaded.task, _json_object(work.training_json, "training_json"), source="training"
        )
        data = self._data(loaded, client_id).train
        training, _ = validation_split(data, settings.validation_share, client_id)
        training = self._on_device(loaded, client_id, settings.validation_share, training)
        classes = loaded.task.classes
        training = within_quotas(training, work.quotas, classes=classes, seed=work.seed)
        correction = self._correction(work, auxiliaries, loaded.layout)
        if cancelled():
            raise RoundClosedError("the training was cancelled; nobody waits for it")
        losses: SquaredLosses | None = None

        def attempt(settings: LocalTraining) -> TrainingResult:
            nonlocal losses
            losses = SquaredLosses(self._device) if UTILITY in _known(work.reports) else None
            with open_tensors(model) as file:
                load_arrays(loaded.model, file.arrays)
            loaded.model.to(self._device)  # before an optimiser is made for its tensors
            return train(
                loaded.model,
                training,
                objective,
                settings,
                classes=loaded.task.classes,
                seed=work.seed,
                round_number=round_number,
                device=self._device,
                corrected=correction,
                optimizer=loaded.optimizer(settings),
                losses=losses,
                progress=progress,
                cancelled=cancelled,
            )

        try:
            result, settings = within_memory(attempt, settings)
        except TrainingError as error:
            if type(error) is TrainingError:  # no learning rate is to blame for NaN in data
                check_finite(data, f"client '{client_id}'")
            raise
        outcome = result.correction
        keep = None if outcome is None else outcome.keep
        if keep is not None and auxiliaries is not None:
            write_kept(keep, auxiliaries.keep_at, loaded.layout)
        names = work.auxiliary.names
        sent = None if outcome is None else sendable(outcome.send, names, loaded.layout)
        arrays, written = state_arrays(loaded.model), None
        if encoding is not None:
            written = write_update(
                update,
                arrays,
                encoding=encoding,
                base=model if work.delta else None,
                compressed=work.compressed,
                seed=work.seed,
                auxiliaries=sent,
                over=spare(),
            )
        return Trained(
            file=written,
            differences=_differences(loaded.model, model, sent) if encoding is None else None,
            result=result,
            settings=settings,
            mu=proximal_weight(objective),
            kept=keep is not None,
            root_mean_square_loss=None if losses is None else losses.root_mean_square(),
            simulated_seconds=work.pace * len(data) if work.pace else None,
        )

    def check(self, work: rpc.Train, layout: bytes) -> None:
        """Whether such a training could begin, on a model with that file header (if not empty).

        Raises PluginError, ConfigurationError, LayoutError, or ProtocolVersionError.
        """
        if work.encoding != MASKED:
            encoding_of(work.encoding)
        loaded = self._load(work.task)
        if layout:
            expected = parse_header(layout[LENGTH_BYTES:])
            loaded.layout.check_matches(expected, what="task's", whose="run's model")
        plugins.create(plugins.OBJECTIVES, work.objective.name, _options(work.objective))
        training_for(
            loaded.task, _json_object(work.training_json, "training_json"), source="training"
        )
        if work.HasField("auxiliary"):
            correction = work.auxiliary.correction
            plugins.create(plugins.CORRECTIONS, correction.name, _options(correction))
        _known(work.reports)

    def _correction(
        self, work: rpc.Train, received: ReceivedAuxiliaries | None, layout: Layout
    ) -> Corrected | None:
        if received is None:
            return None
        plugin = work.auxiliary.correction
        made: LocalCorrection = plugins.create(plugins.CORRECTIONS, plugin.name, _options(plugin))
        return corrected(made, received, layout)

    def evaluate(self, work: rpc.Evaluate, *, client_id: ClientId, model: Path) -> EvaluationCounts:
        """Counts of the file `model` on a client's held-out samples.

        Raises PluginError, ConfigurationError, LayoutError, TrainingError or StorageError.
        """
        loaded = self._load(work.task)
        held_out = self._data(loaded, client_id).held_out
        if held_out is None:
            raise TrainingError(
                f"client '{client_id}' holds no samples out to evaluate on; choose a task option "
                "that makes it do so, or set evaluation.every = 0",
                client=client_id,
            )
        with open_tensors(model) as file:
            load_arrays(loaded.model, file.arrays)
        counts = evaluate(
            loaded.model,
            held_out,
            classes=loaded.task.classes,
            groups=loaded.task.groups,
            device=self._device,
        )
        if not math.isfinite(counts.loss_sum):
            check_finite(held_out, f"client '{client_id}', held out,")
        return counts

    def question(self, work: rpc.Question) -> Question:
        """What is asked. Raises PluginError for a kind or parameters this host does not know."""
        parameters = _json_object(work.parameters_json, f"parameters of '{work.kind}'")
        question: Question = plugins.create(plugins.QUESTIONS, work.kind, parameters)
        return question

    def answer(
        self,
        question: Question,
        work: rpc.Question,
        *,
        client_id: ClientId,
        round_number: int,
        model: Path | None,
        cancelled: Callable[[], bool],
    ) -> Mapping[str, float]:
        """A client's answer, with the file `model` where the question needs one.

        Raises PluginError, ConfigurationError, LayoutError, TrainingError, StorageError, and
        RoundClosedError when cancelled.
        """
        loaded = self._load(work.task)
        if model is not None:
            with open_tensors(model) as file:
                load_arrays(loaded.model, file.arrays)
        values = question.answer(
            QuestionContext(
                client=client_id,
                round=round_number,
                data=self._data(loaded, client_id),
                classes=loaded.task.classes,
                groups=loaded.task.groups,
                device=self._device,
                model=None if model is None else loaded.model,
                cancelled=cancelled,
                validation_share=min(max(work.validation_share, 0.0), 0.5),
                pace=work.pace,
            )
        )
        return {name: float(value) for name, value in values.items()}

    def label_counts(self, plugin: rpc.Plugin, client_id: ClientId) -> list[int]:
        """A client's training samples by class. Raises PluginError, TrainingError."""
        loaded = self._load(plugin)
        return label_counts(self._data(loaded, client_id).train, loaded.task.classes)

    def interaction_matrix(self, plugin: rpc.Plugin, client_id: ClientId) -> list[list[int]]:
        """A client's training samples by class and attribute. Raises PluginError, TrainingError."""
        loaded = self._load(plugin)
        task = loaded.task
        return interaction_matrix(self._data(loaded, client_id).train, task.classes, task.groups)

    def triplet(
        self,
        plugin: rpc.Plugin,
        parameters: Parameters,
        client_id: ClientId,
        *,
        model: Path,
        randomness: random.Random,
        cancelled: Callable[[], bool],
    ) -> dict[str, Any]:
        """A client's triplet, estimated with the file `model`, as it is sent.

        `randomness`: what noise is drawn from; see `noisy_counts`.

        Raises PluginError, LayoutError, TrainingError, and RoundClosedError when cancelled.
        """
        loaded = self._load(plugin)
        privacy = None
        if parameters.epsilon is not None and parameters.adjacency is not None:
            privacy = LocalPrivacy(
                epsilon=parameters.epsilon,
                adjacency=parameters.adjacency,
                randomness=randomness,
            )
        with open_tensors(model) as file:
            estimate = estimate_triplet(
                loaded.model,
                file.arrays,
                self._data(loaded, client_id).train,
                classes=loaded.task.classes,
                settings=parameters.settings or TripletSettings(),
                seed=_own_seed(client_id, parameters.model or ""),
                device=self._device,
                privacy=privacy,
                cancelled=cancelled,
            )
        return {"triplet": list(estimate.triplet), "degenerate": estimate.degenerate}

    def _load(self, plugin: rpc.Plugin) -> _LoadedTask:
        key = (plugin.name, plugin.options_json, plugin.model_json)
        loaded = self._tasks.get(key)
        if loaded is None:
            task = make_task(
                plugin.name,
                _options(plugin),
                model=_json_object(plugin.model_json, f"model of '{plugin.name}'"),
                model_modules=self._model_modules,
            )
            model = task.model()
            layout = Layout.of(state_arrays(model))
            loaded = _LoadedTask(
                name=plugin.name, task=task, model=model, layout=layout, data=OrderedDict()
            )
            self._tasks[key] = loaded
        self._tasks.move_to_end(key)
        while len(self._tasks) > _TASKS_KEPT:
            self._tasks.popitem(last=False)
        return loaded

    def _on_device(
        self, loaded: _LoadedTask, client_id: ClientId, share: float, samples: Examples
    ) -> Examples:
        if loaded.on_device is None:
            loaded.on_device = DeviceSamples(self._device)
        return loaded.on_device.of((client_id, share), samples)

    def _data(self, loaded: _LoadedTask, client_id: ClientId) -> ClientData:
        data = loaded.data.get(client_id)
        if data is None:
            data = loaded.task.client_data(client_id, self._data_directory)
            check_client_data(data, loaded.name, client_id)
            loaded.data[client_id] = data
        loaded.data.move_to_end(client_id)
        while len(loaded.data) > _CLIENTS_KEPT:
            loaded.data.popitem(last=False)
        return data


def _differences(
    trained: nn.Module, model: Path, beside: Mapping[str, Mapping[str, NDArray[np.float32]]] | None
) -> Differences:
    with open_tensors(model) as file:
        return differences(state_arrays(trained), file, buffer_names(trained), beside or {})


def _own_seed(client_id: ClientId, model: str) -> int:
    """Seed of a client's estimate: not the coordinator's to choose, so it can't try several."""
    return int.from_bytes(hashlib.sha256(f"{client_id}/{model}".encode()).digest()[:8], "big") >> 1


def resolve_device(device: str) -> str:
    """ "cpu" or "cuda:N" for auto, cpu or cuda:N. Raises ConfigurationError if it is not there."""
    if device == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda:0" if count else "cpu"
    if int(device.removeprefix("cuda:")) >= count:
        choices = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
        raise ConfigurationError(
            f"device {device} is not there; this machine has {choices}", device=device
        )
    return device


def _options(plugin: rpc.Plugin) -> dict[str, object]:
    return _json_object(plugin.options_json, f"options of '{plugin.name}'")


def _known(reports: Sequence[str]) -> frozenset[str]:
    unknown = sorted(set(reports) - {UTILITY})
    if unknown:
        raise ProtocolVersionError(
            f"this host's software can't report '{unknown[0][:80]}' with an update; update it",
            report=unknown[0][:80],
        )
    return frozenset(reports)


def _json_object(text: str, what: str) -> dict[str, object]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{what}: not a JSON object: {text[:80]!r}")
    return value
