"""Training and evaluation on this host's device. Everything here runs in one worker thread.

Importing this module imports torch, which takes seconds: the agent does it in that thread, while
the host connects.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from potluck.client.question import Question, QuestionContext
from potluck.client.training.loaded_tasks import LoadedTasks
from potluck.client.training.local_update import (
    Trained,
    TrainingFiles,
    plan_training,
    train_update,
)
from potluck.client.training.plugin_options import json_object
from potluck.client.training.samples.signals import interaction_matrix, label_counts
from potluck.client.training.triplet_estimate import (
    EstimateTerms,
    LocalPrivacy,
    estimate_matrix,
    released_triplet,
)
from potluck.common.disclosure import Parameters
from potluck.common.errors import ConfigurationError, TrainingError
from potluck.common.learning.evaluation import evaluate
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.learning.task_checks import check_finite
from potluck.common.learning.triplet import TripletSettings
from potluck.common.names import ClientId
from potluck.common.settings import plugins
from potluck.common.settings.plugins import MODEL_MODULES
from potluck.common.tensors.layout import LENGTH_BYTES, Layout, parse_header
from potluck.common.tensors.tensor_files import open_tensors
from potluck.rpc.v1 import coordinator_pb2 as rpc


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
        self._tasks = LoadedTasks(self._device, data_directory, model_modules)

    def layout(self, plugin: rpc.Plugin) -> Layout:
        """The layout of a task's model. Raises PluginError, or LayoutError."""
        return self._tasks.of(plugin).layout

    def train(
        self,
        instruction: rpc.Instruction,
        files: TrainingFiles,
        *,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> Trained:
        """Train a client and write its update; see `train_update`."""
        loaded = self._tasks.of(instruction.train.task)
        return train_update(loaded, instruction, files, progress=progress, cancelled=cancelled)

    def check(self, work: rpc.Train, layout: bytes) -> None:
        """Check that such a training could begin, on a model with that file header (if not empty).

        Raises PluginError, ConfigurationError, LayoutError, or ProtocolVersionError.
        """
        loaded = self._tasks.of(work.task)
        if layout:
            expected = parse_header(layout[LENGTH_BYTES:])
            loaded.layout.check_matches(expected, what="task's", whose="run's model")
        plan_training(work, loaded.task)

    def evaluate(self, work: rpc.Evaluate, *, client_id: ClientId, model: Path) -> EvaluationCounts:
        """Counts of the file `model` on a client's held-out samples.

        Raises PluginError, ConfigurationError, LayoutError, TrainingError or StorageError.
        """
        loaded = self._tasks.of(work.task)
        held_out = loaded.client_data(client_id).held_out
        if held_out is None:
            raise TrainingError(
                f"client '{client_id}' holds no samples out to evaluate on; choose a task option "
                "that makes it do so, or set evaluation.every = 0",
                client=client_id,
            )
        loaded.set_weights(model)
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
        """The question. Raises PluginError for a kind or parameters this host does not know."""
        parameters = json_object(work.parameters_json, f"parameters of '{work.kind}'")
        return plugins.create(Question, work.kind, parameters)

    def answer(
        self,
        question: Question,
        instruction: rpc.Instruction,
        *,
        model: Path | None,
        cancelled: Callable[[], bool],
    ) -> Mapping[str, float]:
        """A client's answer, with the file `model` where the question needs one.

        Raises PluginError, ConfigurationError, LayoutError, TrainingError, StorageError, and
        RoundClosedError when cancelled.
        """
        work, client_id = instruction.question, ClientId(instruction.client_id)
        loaded = self._tasks.of(work.task)
        if model is not None:
            loaded.set_weights(model)
        values = question.answer(
            QuestionContext(
                client=client_id,
                round=instruction.round,
                data=loaded.client_data(client_id),
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
        loaded = self._tasks.of(plugin)
        return label_counts(loaded.client_data(client_id).train, loaded.task.classes)

    def interaction_matrix(self, plugin: rpc.Plugin, client_id: ClientId) -> list[list[int]]:
        """A client's training samples by class and attribute. Raises PluginError, TrainingError."""
        loaded = self._tasks.of(plugin)
        task = loaded.task
        return interaction_matrix(loaded.client_data(client_id).train, task.classes, task.groups)

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
        loaded = self._tasks.of(plugin)
        privacy = None
        if parameters.epsilon is not None and parameters.adjacency is not None:
            privacy = LocalPrivacy(
                epsilon=parameters.epsilon,
                adjacency=parameters.adjacency,
                randomness=randomness,
            )
        terms = EstimateTerms(
            settings=parameters.settings or TripletSettings(),
            seed=_own_seed(client_id, parameters.model or ""),
            device=self._device,
            cancelled=cancelled,
        )
        samples = loaded.client_data(client_id).train
        with open_tensors(model) as file:
            found = estimate_matrix(
                loaded.model, file.arrays, samples, classes=loaded.task.classes, terms=terms
            )
        estimate = released_triplet(found, privacy)
        return {"triplet": list(estimate.triplet), "degenerate": estimate.degenerate}


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
