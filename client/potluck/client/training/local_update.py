"""Makes a client's update for one round: from an instruction to train to the update's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.client.disclosure.weightings import is_masked, weighting_of
from potluck.client.question import Question
from potluck.client.training.plugin_options import json_object
from potluck.client.training.summable_updates import SUM, fixed_point_terms, write_summable_update
from potluck.client.training.task_training import (
    GroupMember,
    LoadedTask,
    Outcome,
    TaskTraining,
    TrainingFiles,
    UnfitForLanesError,
)
from potluck.client.training.unmasked_update import Differences, differences
from potluck.client.training.update_encoding import encoding_of, write_update
from potluck.common.disclosure import Weighting
from potluck.common.errors import NotFiniteError, PotluckError, ProtocolError, TrainingError
from potluck.common.names import ClientId
from potluck.common.settings import plugins
from potluck.common.tensors.encoding import Encoding
from potluck.common.tensors.layout import quoted
from potluck.common.tensors.model_arrays import buffer_names
from potluck.common.tensors.tensor_files import (
    FileDigest,
    block_is_within_bounds,
    open_tensors,
    write_tensors,
)
from potluck.common.trainer import TrainingProgress
from potluck.common.updates.kept_states import MODEL
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc

_Sent = Mapping[str, Mapping[str, NDArray[np.float32]]] | None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished training: its update is written, or must still be masked.

    simulated_seconds: duration of the training on the run's virtual clock, if it has one. offer:
    the answer to the question in the training's instruction.
    """

    file: FileDigest | None
    differences: Differences | None
    outcome: Outcome
    simulated_seconds: float | None
    offer: Mapping[str, float] = field(default_factory=dict)

    def report(self, weighting: Weighting) -> UpdateReport:
        """Return the report of the training for a weighting.

        The training time would disclose the number of samples, so it is reported as 0 unless
        weighting = "exact".
        """
        outcome, simulated = self.outcome, self.simulated_seconds
        seconds = outcome.seconds if simulated is None else simulated
        told = seconds if weighting is Weighting.EXACT else 0.0
        return replace(outcome.report(weighting), seconds=told)


def check_training(training: TaskTraining, work: rpc.Train) -> None:
    """Check that the training `work` could begin.

    Raises PluginError, ConfigurationError, or ProtocolError if this host can't carry out the
    training."""
    if work.encoding == SUM:
        fixed_point_terms(work)
    else:
        _encoding(work)
    training.check(work)


def train_update(
    training: TaskTraining,
    instruction: rpc.Instruction,
    files: TrainingFiles,
    *,
    progress: Callable[[float], None],
    cancelled: Callable[[], bool],
) -> Trained:
    """Train from the model's file and write the update; return an update that must be masked.

    Raises PluginError, ConfigurationError, LayoutError, NotFiniteError, ProtocolError,
    TrainingError, StorageError, and RoundClosedError when cancelled.
    """
    outcome = training.train(instruction, files, TrainingProgress(progress, cancelled))
    return _finished(training, instruction, files, outcome, cancelled)


def train_updates(
    training: TaskTraining, members: Sequence[GroupMember], companions: Sequence[ClientId]
) -> list[Trained | PotluckError | UnfitForLanesError]:
    """Train several clients at once and write their updates; return results in their order.

    An error of one client does not affect the others. companions: see
    `TaskTraining.train_together`. Raises UnfitForLanesError if the clients must be trained one by
    one, and what `train_update` raises if it concerns all.
    """
    updates: list[Trained | PotluckError | UnfitForLanesError] = []
    for member, trained in zip(members, training.train_together(members, companions), strict=True):
        if isinstance(trained, Exception):
            updates.append(trained)
            continue
        try:
            trained.load()
            update = _finished(
                training,
                member.instruction,
                member.files,
                trained.outcome,
                member.progress.is_cancelled,
            )
        except PotluckError as error:
            updates.append(error)
        else:
            updates.append(update)
    return updates


def _finished(
    training: TaskTraining,
    instruction: rpc.Instruction,
    files: TrainingFiles,
    outcome: Outcome,
    cancelled: Callable[[], bool],
) -> Trained:
    """Write the update from the trained model."""
    work, loaded = instruction.train, training.loaded
    masked = is_masked(work)
    if loaded.kept:
        _write_kept(files.keep_at(MODEL), loaded.kept_weights())
        outcome = replace(outcome, kept=True)
    trained = Trained(
        offer=_offer(training, instruction, cancelled),
        file=None,
        differences=_differences(files.model, loaded, outcome.sent) if masked else None,
        outcome=outcome,
        simulated_seconds=work.pace * outcome.paced_samples if work.pace else None,
    )
    if work.encoding == SUM:
        return replace(trained, file=_summable(instruction, files, loaded, trained))
    return trained if masked else replace(trained, file=_written(work, files, loaded, outcome.sent))


def _offer(
    training: TaskTraining, instruction: rpc.Instruction, cancelled: Callable[[], bool]
) -> Mapping[str, float]:
    """Answer the question in a training's instruction, about the trained model."""
    work = instruction.train
    if not work.HasField("before_upload"):
        return {}
    asked = rpc.Instruction(
        id=instruction.id,
        client_id=instruction.client_id,
        run_id=instruction.run_id,
        round=instruction.round,
        question=work.before_upload,
    )
    question = make_question(work.before_upload)
    return question.answer(training.question_context(asked, cancelled, None, trained=True))


def make_question(work: rpc.Question) -> Question:
    """Create the question in `work`. Raises PluginError if its kind or parameters are unknown."""
    parameters = json_object(work.parameters_json, f"parameters of '{work.kind}'")
    return plugins.create(Question, work.kind, parameters)


def _encoding(work: rpc.Train) -> Encoding | None:
    """Return the encoding of the update's file; None if the update will be masked."""
    return None if is_masked(work) else encoding_of(work.encoding)


def _summable(
    instruction: rpc.Instruction, files: TrainingFiles, loaded: LoadedTask, trained: Trained
) -> FileDigest:
    """Write the update in fixed point, so that it can be added to those of other clients."""
    network: Any = loaded.model
    with open_tensors(files.model) as base:
        return write_summable_update(
            files.update,
            instruction,
            loaded.weights(),
            base,
            trained.report(weighting_of(instruction.train)),
            buffers=buffer_names(network),
            auxiliaries=trained.outcome.sent or {},
            over=files.spare(),
        )


def _written(work: rpc.Train, files: TrainingFiles, loaded: LoadedTask, sent: _Sent) -> FileDigest:
    """Write the trained model as an update."""
    return write_update(
        files.update,
        _returned(work, files, loaded),
        encoding=encoding_of(work.encoding),
        base=files.model if work.delta else None,
        compressed=work.compressed,
        seed=work.seed,
        auxiliaries=sent,
        over=files.spare(),
    )


def _returned(work: rpc.Train, files: TrainingFiles, loaded: LoadedTask) -> dict[str, NDArray[Any]]:
    """Return the tensors of the update. Raises TrainingError if other tensors were trained."""
    arrays = loaded.weights()
    returned = loaded.layout.without(work.one_way).by_name
    if len(returned) == len(arrays):
        return _without(arrays, work.dropped)
    with open_tensors(files.model) as file:
        for name, array in arrays.items():
            if name not in returned and not np.array_equal(array, file.arrays[name]):
                raise TrainingError(
                    f"task '{loaded.name}' has trained tensor {quoted(name)}, which only the "
                    "coordinator may change in this run; freeze the tensor, or choose another "
                    "strategy"
                )
    return _without({n: array for n, array in arrays.items() if n in returned}, work.dropped)


def _without(arrays: dict[str, NDArray[Any]], dropped: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the tensors without those named in `dropped`.

    Raises ProtocolError for names that can't be dropped.
    """
    if not dropped:
        return arrays
    left = {name: array for name, array in arrays.items() if name not in set(dropped)}
    floating = {name for name, array in arrays.items() if array.dtype.kind == "f"}
    strangers = sorted(set(dropped) - floating)
    if strangers or not floating & left.keys():
        what = quoted(strangers[0]) if strangers else "any tensor"
        raise ProtocolError(
            f"the coordinator wants an update without {what}, which is not possible; an update "
            f"must contain at least one of the model's {len(floating)} floating-point tensors"
        )
    return left


def _write_kept(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the tensors that the client stores for its next training."""
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not block_is_within_bounds(array):
            raise NotFiniteError(
                f"tensor '{name[:80]}', which the client keeps, contains NaN, infinity or huge "
                "numbers after the training; lower training.learning_rate",
                tensor=name,
            )
    write_tensors(path, arrays, sync=True)


def _differences(model: Path, loaded: LoadedTask, sent: _Sent) -> Differences:
    trained: Any = loaded.model
    with open_tensors(model) as file:
        return differences(loaded.weights(), file, buffer_names(trained), sent or {})
