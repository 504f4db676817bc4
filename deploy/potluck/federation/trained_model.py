"""A run's model as a network with its weights."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from potluck.common.learning.task_loading import model_maker, models_seeded
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings.configuration import validate
from potluck.common.task import Task
from potluck.common.tensors.model_parts import divided
from potluck.common.tensors.tensor_files import open_tensors
from potluck.federation.session_plugins import SessionPlugins


def trained_network(path: Path, run_file: str, session: SessionPlugins, data: Path | None) -> Any:
    """The network that a run trains, with the weights of a downloaded file.

    A `torch.nn.Module` in evaluation mode, or a dict of arrays where the task's model is one.
    run_file: the run's, TOML. data: the data directory, for a model whose base lies there. Tensors
    that clients keep (`[model] keep`) have the values that they began with.
    Raises PluginError for a task that is not installed here, LayoutError where its model is another
    one, ConfigurationError where the base does not lie there.
    """
    run = validate(RunFile, tomllib.loads(run_file), source="the run's file")
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
    return network
