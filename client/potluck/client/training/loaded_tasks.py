"""Tasks that stay loaded on a device, each with its model and its clients' data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch

from potluck.client.training.optimizers import LocalOptimizer, make_optimizer
from potluck.client.training.plugin_options import json_object, options_of
from potluck.client.training.samples.device_samples import DeviceSamples
from potluck.common.learning.task_checks import check_client_data
from potluck.common.learning.task_loading import make_task
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import MODEL_MODULES
from potluck.common.task import ClientData, Examples, Task
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import load_arrays, state_arrays
from potluck.common.tensors.tensor_files import open_tensors
from potluck.rpc.v1 import coordinator_pb2 as rpc

_TASKS_KEPT = 4
_CLIENTS_KEPT = 64


class LoadedTask:
    """A task with what is used again from one client and round to the next."""

    def __init__(
        self, name: str, task: Task, device: torch.device, data_directory: Path | None
    ) -> None:
        self.task, self.device = task, device
        self.model = task.model()
        self.layout = Layout.of(state_arrays(self.model))
        self._name, self._data_directory = name, data_directory
        self._data: OrderedDict[ClientId, ClientData] = OrderedDict()
        self._on_device: DeviceSamples | None = None
        self._settings: LocalTraining | None = None
        self._optimizer: LocalOptimizer | None = None

    def set_weights(self, file: Path) -> None:
        """Give the model the weights in a file. Raises LayoutError, StorageError."""
        with open_tensors(file) as tensors:
            load_arrays(self.model, tensors.arrays)

    def client_data(self, client_id: ClientId) -> ClientData:
        """A client's data, loaded once. Raises TrainingError where the task gives none."""
        data = self._data.get(client_id)
        if data is None:
            data = self.task.client_data(client_id, self._data_directory)
            check_client_data(data, self._name, client_id)
            self._data[client_id] = data
        self._data.move_to_end(client_id)
        while len(self._data) > _CLIENTS_KEPT:
            self._data.popitem(last=False)
        return data

    def on_device(self, client_id: ClientId, share: float, samples: Examples) -> Examples:
        """A client's training samples on the device, where `share` of them is kept back."""
        if self._on_device is None:
            self._on_device = DeviceSamples(self.device)
        return self._on_device.of((client_id, share), samples)

    def optimizer(self, settings: LocalTraining) -> LocalOptimizer:
        """The optimiser of the last training, if it was one with these settings; else a new one."""
        if self._optimizer is None or self._settings != settings:
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            self._optimizer = make_optimizer(parameters, settings, round_number=1)
            self._settings = settings
        return self._optimizer


class LoadedTasks:
    """The tasks used last on a device."""

    def __init__(
        self,
        device: torch.device,
        data_directory: Path | None,
        model_modules: Sequence[str] = MODEL_MODULES,
    ) -> None:
        """`model_modules`: where models that a run file names are looked for."""
        self._device, self._data_directory = device, data_directory
        self._model_modules = model_modules
        self._loaded: OrderedDict[tuple[str, str, str], LoadedTask] = OrderedDict()

    def of(self, plugin: rpc.Plugin) -> LoadedTask:
        """A task, loaded where it is not. Raises PluginError, ConfigurationError, LayoutError."""
        key = (plugin.name, plugin.options_json, plugin.model_json)
        loaded = self._loaded.get(key)
        if loaded is None:
            task = make_task(
                plugin.name,
                options_of(plugin),
                model=json_object(plugin.model_json, f"model of '{plugin.name}'"),
                model_modules=self._model_modules,
            )
            loaded = LoadedTask(plugin.name, task, self._device, self._data_directory)
            self._loaded[key] = loaded
        self._loaded.move_to_end(key)
        while len(self._loaded) > _TASKS_KEPT:
            self._loaded.popitem(last=False)
        return loaded
