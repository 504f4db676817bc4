"""Loads the models of runs as networks with weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.common.errors import LayoutError, StorageError
from potluck.common.learning.task_loading import model_maker, models_seeded
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings.configuration import validate
from potluck.common.settings.extras import extra_named
from potluck.common.task import Task
from potluck.common.tensors.model_parts import divided
from potluck.common.tensors.tensor_files import open_tensors
from potluck.federation.session_plugins import SessionPlugins

with extra_named():
    from safetensors import SafetensorError, safe_open


@dataclass(frozen=True)
class TrainedModel:
    """A task and a network with the weights of a run."""

    task: Task
    network: Any


def trained_model(
    path: Path, run: RunFile, session: SessionPlugins, data: Path | None
) -> TrainedModel:
    """Return the network that a run trains, with the weights of a downloaded file.

    The network is a `torch.nn.Module` in evaluation mode, or a dict of arrays if the task's model
    is a dict. run: the run's file. data: the data directory; needed if the model's base (pretrained
    weights) is read from it. Tensors that clients keep (`[model] keep`) have their initial values.
    Raises PluginError for a task that is not installed here, LayoutError if the file is of another
    model, ConfigurationError if the base is not in the data directory.
    """
    task = session.make(Task, run.task.name, run.task.options)
    table = None if run.model is None else run.model.with_seed(run.seed)
    make = task.model
    if table is not None and table.name is not None:
        module = table.name.partition(":")[0]
        make = model_maker(table.name, table.options, (module,))
    with models_seeded(run.seed if table is None or table.keep_seed is None else table.keep_seed):
        network = make()
    whole = divided(network, table, data)
    with open_tensors(path) as file:
        whole.load(file.arrays)
    if hasattr(network, "eval"):
        network.eval()
    return TrainedModel(task, network)


def load_model(path: str | Path, *, data: str | Path | None = None) -> Any:
    """Return the network with the weights of a file that `potluck model` or `Run.save` wrote.

    The file's metadata name the task, which must be installed. The network has the form that
    `Run.model` returns. data: the data directory; needed if the model's base (pretrained weights)
    is read from it. Raises LayoutError for a file without such metadata, StorageError if it can't
    be read, and the errors of `trained_model`.
    """
    try:
        Path(path).stat()  # its error states only the reason; the error below would repeat the path
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror or error}", path=path) from None
    except SafetensorError as error:
        raise LayoutError(f"{path} is not a safetensors file: {error}", path=path) from None
    if "potluck.task" not in metadata:
        raise LayoutError(
            f"{path} does not name the task of its model; download the model with `potluck model` "
            "without --exact",
            path=path,
        )
    table = {
        name: json.loads(metadata[f"potluck.{name}"])
        for name in ("task", "model")
        if f"potluck.{name}" in metadata
    }
    table["seed"] = int(metadata.get("potluck.seed", 0))
    folder = None if data is None else Path(data)
    run = validate(RunFile, table, source="the run's file")
    return trained_model(Path(path), run, SessionPlugins(), folder).network
