"""The common interface of tasks with the built-in loop and tasks with their own trainer.

Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from potluck.client.base.availability_plan import Forecast, always
from potluck.client.private_training import GrantedTraining
from potluck.client.question import LocalUpdate, QuestionContext
from potluck.common.disclosure import Weighting
from potluck.common.errors import NothingHeldOutError, PotluckError
from potluck.common.learning.measures import MeasureSums
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.learning.task_loading import models_seeded
from potluck.common.names import ClientId
from potluck.common.settings.model_table import ModelTable
from potluck.common.task import ClientData, Task
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import buffer_names
from potluck.common.tensors.model_parts import DividedModel, divided
from potluck.common.tensors.tensor_files import open_tensors
from potluck.common.trainer import TrainingProgress
from potluck.common.updates.kept_states import MODEL, PERSONAL
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:
    from potluck.client.training.auxiliary_files import ReceivedAuxiliaries
    from potluck.client.training.processes.worker_count import TrainingMemory

_CLIENTS_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class ClientFiles:
    """The files with which a model is measured or trained at a client.

    model: the received file. kept: the states, by purpose, that the client stored after its last
    training whose update is in the model. own: the folder for files of the task's own trainer; it
    may not exist yet.
    """

    model: Path
    kept: Mapping[str, Path] = field(default_factory=dict)
    own: Path | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingFiles(ClientFiles):
    """The files of a training.

    update: file to be written. keep_at: returns the path of a state for the next training, by its
    purpose. auxiliaries: tensors that the strategy sent in addition to the model; None if it sent
    none.
    spare: returns a file that may be overwritten; None if there is none. granted: terms of a
    training with noise, already charged to the ledger; None without noise.
    """

    update: Path
    keep_at: Callable[[str], Path]
    auxiliaries: ReceivedAuxiliaries | None = None
    spare: Callable[[], Path | None] = lambda: None
    granted: GrantedTraining | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of a training in addition to the changed model.

    samples: number of training samples, not yet disclosed. paced_samples: number of samples for
    which a virtual clock counts seconds. seen: samples that went through the model, with
    repetitions. seconds: wall-clock time. loss: NaN if there is none. report: returns the report
    for a `Weighting`, the precision of the disclosed number of samples. kept: True if a state for
    the next training was written. sent: tensors to send in addition to the model.
    """

    samples: int
    paced_samples: int
    seen: int
    seconds: float
    loss: float
    report: Callable[[Weighting], UpdateReport]
    kept: bool = False
    sent: Mapping[str, Mapping[str, NDArray[np.float32]]] | None = field(default=None)


class UnfitForLanesError(Exception):
    """Raised if clients can't be trained in one batched step; the text is a short reason."""


@dataclass(frozen=True, kw_only=True)
class GroupMember:
    """A client that is trained together with others. lane: its position among its companions."""

    instruction: rpc.Instruction
    files: TrainingFiles
    progress: TrainingProgress
    lane: int


@dataclass(frozen=True, kw_only=True)
class TrainedMember:
    """Result of a member's training. load: sets the loaded model's weights to the member's."""

    outcome: Outcome
    load: Callable[[], None]


class LoadedTask:
    """A task, with the model and data that are reused across clients and rounds.

    device: "cpu" or "cuda:N".
    """

    def __init__(
        self,
        name: str,
        task: Task,
        device: str,
        data_directory: Path | None,
        model_table: ModelTable | None = None,
        forecast: Forecast = always,
        choices: Path | None = None,
        sharing: int = 1,
    ) -> None:
        """model_table: the run's `[model]` table, which selects the tensors that are sent; by
        default all. forecast: function that returns the chance that a client is available. choices:
        folder of the `LaneChoices`. sharing: number of processes that share the device. Raises
        ConfigurationError if the tensors that are not sent differ from the run's.
        """
        self.name, self.task, self.device = name, task, device
        self.choices, self.sharing = choices, sharing
        self.forecast = forecast
        self._model_table, self._data_directory = model_table, data_directory
        self._parts = self._divided()
        self._data: OrderedDict[ClientId, ClientData[Any]] = OrderedDict()

    def _divided(self) -> DividedModel:
        """Return a new model, divided into its parts."""
        table = self._model_table
        with contextlib.ExitStack() as stack:
            if table is not None and table.keep_seed is not None:
                stack.enter_context(models_seeded(table.keep_seed))
            network = self.task.model()
        return divided(network, table, self._data_directory)

    def set_weights(self, files: ClientFiles) -> None:
        """Set the model's weights to the received ones, and the kept tensors to the client's own.

        Kept tensors without a file get their initial values. Raises LayoutError, StorageError."""
        with contextlib.ExitStack() as stack:
            model = stack.enter_context(open_tensors(files.model)).arrays
            own = files.kept.get(MODEL) if self.kept else None
            kept = None if own is None else stack.enter_context(open_tensors(own)).arrays
            self._parts.load(model, kept)

    @property
    def model(self) -> Any:
        """The model, with all its parts."""
        return self._parts.network

    @property
    def layout(self) -> Layout:
        """The layout of the tensors that are sent."""
        return self._parts.layout

    @property
    def kept(self) -> frozenset[str]:
        """Names of the model's tensors that clients keep."""
        return frozenset(self._parts.kept)

    def kept_weights(self) -> dict[str, NDArray[Any]]:
        """Return the tensors that the client keeps.

        Raises LayoutError if a training has changed their layout."""
        return self._parts.kept_arrays()

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the tensors that are sent, in the form of `state_arrays`."""
        return self._parts.arrays()

    def check_base(self) -> None:
        """Raise LayoutError if a training has changed tensors that it must not train."""
        self._parts.check_base()

    def renew(self) -> None:
        """Replace the model by a new one, because the state of the current one is unknown."""
        self._parts = self._divided()

    def client_data(
        self, client_id: ClientId, check: Callable[[ClientData[Any]], None] = lambda _: None
    ) -> ClientData[Any]:
        """Return a client's data; load and check it if it is not in memory."""
        data = self._data.get(client_id)
        if data is None:
            data = self.task.client_data(client_id, self._data_directory)
            check(data)
            self._data[client_id] = data
        self._data.move_to_end(client_id)
        while len(self._data) > _CLIENTS_KEPT:
            self._data.popitem(last=False)
        return data


class TaskTraining(ABC):
    """A loaded task and the way it trains. Used by one thread.

    Its methods raise PluginError, ConfigurationError, LayoutError, NotFiniteError, ProtocolError,
    TrainingError, StorageError, and RoundClosedError when cancelled.
    """

    trains_by_itself: ClassVar[bool] = False
    """True if the task brings its own trainer, whose data need not be `Examples`."""

    def __init__(self, loaded: LoadedTask) -> None:
        self.loaded = loaded

    @abstractmethod
    def check(self, work: rpc.Train) -> None:
        """Check that the training `work` could begin."""

    @abstractmethod
    def train(
        self, instruction: rpc.Instruction, files: TrainingFiles, progress: TrainingProgress
    ) -> Outcome:
        """Train the loaded model, starting from the weights in the file."""

    def train_together(
        self,
        members: Sequence[GroupMember],  # noqa: ARG002 - for those that can
        companions: Sequence[ClientId],  # noqa: ARG002 - likewise
    ) -> Sequence[TrainedMember | PotluckError | UnfitForLanesError]:
        """Train several clients in one batched step; return their results in order.

        companions: all clients that might be trained together, by lane. A member's result depends
        on the list of companions, not on which of them are trained now. The result is an
        UnfitForLanesError if the member must be trained alone. Raises UnfitForLanesError if all
        members must be.
        """
        raise UnfitForLanesError("the task has a trainer of its own")

    def evaluate(
        self, instruction: rpc.Instruction, files: ClientFiles, progress: TrainingProgress
    ) -> EvaluationCounts | MeasureSums:
        """Measure a model on a client's held-out samples.

        The model is the received one, the received one after more training that is then discarded,
        or the client's own."""
        work = instruction.evaluate
        if work.HasField("tuning"):
            self._train_aside(instruction, work.tuning, files, progress)
        else:
            own = files.kept.get(PERSONAL) if work.personal else None
            self.set_weights(files if own is None else replace(files, model=own))
        return self.measured(instruction, files)

    def _train_aside(
        self,
        instruction: rpc.Instruction,
        work: rpc.Train,
        files: ClientFiles,
        progress: TrainingProgress,
    ) -> None:
        """Train the model for an instruction that is not a training; discard all written files."""
        training = rpc.Instruction()
        training.CopyFrom(instruction)
        training.train.CopyFrom(work)
        with tempfile.TemporaryDirectory(prefix="potluck-aside-") as name:
            folder = Path(name)
            if files.own is not None and files.own.is_dir():
                shutil.copytree(files.own, folder / "own")
            aside = TrainingFiles(
                model=files.model,
                kept=files.kept,
                own=folder / "own",
                update=folder / "update",
                keep_at=lambda purpose: folder / f"{purpose}.safetensors",
            )
            self.train(training, aside, progress)

    def memory_of(
        self,
        instruction: rpc.Instruction,  # noqa: ARG002 - for those that can
        files: ClientFiles,  # noqa: ARG002 - likewise
        progress: TrainingProgress,  # noqa: ARG002 - likewise
    ) -> TrainingMemory | None:
        """Measure the GPU memory of a training.

        Returns None if the training is not on a GPU, or can't run without leaving traces."""
        return None

    def set_weights(self, files: ClientFiles) -> None:
        """Set the model's weights from files."""
        self.loaded.set_weights(files)

    @abstractmethod
    def measured(
        self, instruction: rpc.Instruction, files: ClientFiles
    ) -> EvaluationCounts | MeasureSums:
        """Measure the loaded model on a client's held-out samples."""

    @abstractmethod
    def question_context(
        self,
        instruction: rpc.Instruction,
        cancelled: Callable[[], bool],
        files: ClientFiles | None,
        *,
        trained: bool = False,
    ) -> QuestionContext:
        """Return the inputs from which a client answers a question.

        files: files of the model; None if the question needs no model. trained: True if the answer
        is about the model after the last training.
        """

    def local_update(
        self,
        instruction: rpc.Instruction,
        files: ClientFiles | None,
        cancelled: Callable[[], bool],
    ) -> Callable[[], LocalUpdate] | None:
        """Return the function `local_update` of a question's context, or None."""
        if files is None or not instruction.question.HasField("train"):
            return None

        def update() -> LocalUpdate:
            progress = TrainingProgress(cancelled=cancelled)
            self._train_aside(instruction, instruction.question.train, files, progress)
            return self._way(files.model)

        return update

    def _way(self, model: Path) -> LocalUpdate:
        """Return the difference of each parameter: current weights minus the model's file."""
        buffers = buffer_names(self.loaded.model)
        with open_tensors(model) as tensors:
            return {
                name: array.astype(np.float32) - tensors.arrays[name].astype(np.float32)
                for name, array in self.loaded.weights().items()
                if array.dtype.kind == "f" and name not in buffers
            }

    @abstractmethod
    def client_data(self, client_id: ClientId) -> ClientData[Any]:
        """Return a client's data after checks."""

    @abstractmethod
    def samples(self, client_id: ClientId) -> int:
        """Return a client's number of training samples, for a training with noise."""

    @abstractmethod
    def label_counts(self, client_id: ClientId) -> list[int]:
        """Return a client's number of training samples per class."""

    def held_out(self, client_id: ClientId, data: ClientData[Any]) -> Any:
        """Return a client's held-out data. Raises NothingHeldOutError if there are none."""
        if data.held_out is None:
            raise NothingHeldOutError(
                f"client '{client_id}' has no held-out samples to evaluate on; choose a task "
                "option that holds samples out, or set evaluation.every = 0",
                client=client_id,
            )
        return data.held_out
