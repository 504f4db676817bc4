"""The job that describes a training on the coordinator, and the function with which the training
process carries it out."""

from __future__ import annotations

import contextlib
import hashlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from potluck.common.errors import ConfigurationError, NotFiniteError, PotluckError, TrainingError
from potluck.common.learning.task_failures import blamed_on_task, plugin_failure
from potluck.common.tensors.model_parts import DividedModel, divided
from potluck.common.tensors.tensor_files import TensorFile, open_tensors, write_tensors
from potluck.server.plan.plan import RunPlan, draw_up
from potluck.server.reduce.update_files import OneUpdate, UpdateFiles
from potluck.server.strategy import ServerTraining

PUBLIC_DATA: Final = "its public data"


class UpdateInJob(BaseModel):
    """One of the round's updates, with its file in the spool."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    client: str
    path: Path
    compressed: bool


class Workplace(BaseModel):
    """Settings of the coordinator's machine. threads: number of torch threads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_modules: tuple[str, ...]
    data_directory: Path | None
    threads: int


class TrainingJob(BaseModel):
    """All inputs of the training process, which shares the disk with the coordinator, but not
    memory.

    run_file: text of the run file. model: the model from which training continues. base: the model
    that clients trained from. updates: the round's updates in client order. trained: path of the
    result.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_file: str
    workplace: Workplace
    round: int
    model: Path
    base: Path
    updates: Sequence[UpdateInJob]
    trained: Path

    def seed(self, run_seed: int) -> int:
        """Return this round's seed: 63 bits of SHA-256(seed / round / coordinator)."""
        text = f"{run_seed}/{self.round}/coordinator"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def public_inputs(plan: RunPlan, data_directory: Path | None) -> torch.Tensor:
    """Return the public data on which the run's strategy trains, n × …, n at least 2.

    Raises ConfigurationError if the task has no public data.
    """
    name = plan.run_file.task.name
    with blamed_on_task(name, PUBLIC_DATA):
        inputs = plan.task.public_data(data_directory)
    if inputs is None or len(inputs) < 2:
        found = "has none" if inputs is None else f"has {len(inputs)}"
        raise ConfigurationError(
            f"strategy {plan.run_file.strategy.name} trains on the coordinator, on public samples, "
            f"but task '{name}' {found}; set `public` of [task] to their number, "
            "or return some from the task's method `public_data`",
            task=name,
        )
    return inputs


def public_labels(plan: RunPlan, data_directory: Path | None) -> torch.Tensor | None:
    """Return the labels of the public data; None if the strategy does not need them.

    Raises ConfigurationError if the task has no labels for them.
    """
    if not plan.strategy.needs_labels:
        return None
    name = plan.run_file.task.name
    with blamed_on_task(name, PUBLIC_DATA):
        labels = plan.task.public_labels(data_directory)
    if labels is None:
        raise ConfigurationError(
            f"strategy {plan.run_file.strategy.name} needs labels of the public samples, but task "
            f"'{name}' has none; return them from the task's method `public_labels`",
            task=name,
        )
    return labels


def carry_out(job: TrainingJob, progress: Callable[[float], None]) -> None:
    """Train according to the job, and write the model. Raises PotluckError."""
    place = job.workplace
    plan = draw_up(job.run_file, source="run file", model_modules=place.model_modules)
    inputs = public_inputs(plan, place.data_directory)
    seed = job.seed(plan.run_file.seed)
    torch.set_num_threads(place.threads)
    with blamed_on_task(plan.run_file.task.name, "its model"):
        network = plan.task.model()
    made = divided(network, plan.run_file.model, place.data_directory)
    files = UpdateFiles(made.layout, plan.run_file.transport.up, plan.strategy.auxiliary)
    with contextlib.ExitStack() as stack:
        with open_tensors(job.model, expected=made.layout) as model:
            made.load(model.arrays)
        base = stack.enter_context(open_tensors(job.base, expected=made.layout))
        torch.manual_seed(seed)
        training = ServerTraining(
            network=network,
            weights=lambda: {name: array.copy() for name, array in made.arrays().items()},
            load=made.load,
            updates=[_opened(each, files, base, stack) for each in job.updates],
            inputs=inputs,
            seed=seed,
            round=job.round,
            progress=progress,
            labels=public_labels(plan, place.data_directory),
        )
        try:
            plan.strategy.train(training)
        except PotluckError:
            raise
        except Exception as error:
            traceback.print_exc()  # the coordinator's log shows this output
            raise TrainingError(plugin_failure(error, plan.plugins, job.round)) from error
    write_tensors(job.trained, _finite(made, plan.run_file.strategy.name), layout=made.layout)


def _opened(
    update: UpdateInJob, files: UpdateFiles, base: TensorFile, stack: contextlib.ExitStack
) -> OneUpdate:
    file = stack.enter_context(files.open(update.path, compressed=update.compressed))
    encoded = files.weights(file, base if files.delta else None)
    return OneUpdate(client=update.client, files=files, file=file, encoded=encoded)


def _finite(made: DividedModel, strategy: str) -> Mapping[str, NDArray[Any]]:
    arrays = made.arrays()
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise NotFiniteError(
                f"after strategy {strategy} has trained on the coordinator, tensor '{name}' "
                "contains NaN or infinity; lower learning_rate of the strategy",
                tensor=name,
            )
    return arrays
