"""Tasks that stay loaded on a device, each with its model and its clients' data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from potluck.client.base.availability_plan import Forecast, always
from potluck.client.training.own_training import OwnTraining
from potluck.client.training.plugin_options import model_table_of, options_of
from potluck.client.training.task_training import LoadedTask, TaskTraining
from potluck.common.learning.measures import own_trainer
from potluck.common.learning.task_loading import make_task
from potluck.common.settings.plugins import MODEL_MODULES
from potluck.rpc.v1 import coordinator_pb2 as rpc

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
        chances that clients are available. `choices`, `sharing`: see `LoadedTask`."""
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
