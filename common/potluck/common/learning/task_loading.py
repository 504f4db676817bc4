"""Loads a task by name, with its own model or with another model that the run file names.

The other model is either installed in the group `potluck.models`, or `MODULE:NAME` of any callable
that returns a torch module. `MODULE:NAME` runs code that a run file chose, so it is allowed only in
modules that the machine's owner lists. Otherwise, a coordinator could call any function that is
installed on a host.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.settings import plugins
from potluck.common.settings.option_checks import checked, signature_of
from potluck.common.settings.plugins import MODEL_MODULES
from potluck.common.task import Task

if TYPE_CHECKING:  # importing torch takes seconds, and not all callers create models
    from torch import nn


_GENERATORS = threading.Lock()  # guards the global generators: several threads may create models


@contextlib.contextmanager
def numpy_seeded(seed: int) -> Iterator[None]:
    """Seed numpy's global generator while the block runs, for models that are arrays; then restore
    its state."""
    state = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(state)


@contextlib.contextmanager
def models_seeded(seed: int) -> Iterator[None]:
    """Seed the generators of models' initial weights on the CPU while the block runs; then restore
    their states.

    The weights equal those that the coordinator creates from the same seed, if both have the same
    releases of the libraries.
    """
    with _GENERATORS, numpy_seeded(seed):
        if importlib.util.find_spec("torch") is None:
            yield
            return
        import torch

        generator = torch.default_generator
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(state)


def make_task(
    name: str,
    options: Mapping[str, object],
    *,
    model: Mapping[str, object] | None = None,
    model_modules: Sequence[str] = MODEL_MODULES,
) -> Task:
    """Return the task called `name`. model: table ("name" and options) of a model that replaces the
    task's own.

    Raises PluginError or ConfigurationError.
    """
    task = plugins.create(Task, name, options)
    if not model:
        return task
    chosen = model.get("name")
    if not isinstance(chosen, str):
        raise ConfigurationError(
            'the table of the model has no `name`; write name = "lenet5", or name = "MODULE:NAME"'
        )
    arguments = {key: value for key, value in model.items() if key != "name"}
    vars(task)["model"] = model_maker(chosen, arguments, model_modules)  # tasks may be frozen
    return task


def model_maker(
    name: str, options: Mapping[str, object], model_modules: Sequence[str] = MODEL_MODULES
) -> Callable[[], nn.Module]:
    """Return a function that creates the model called `name` with these options.

    Raises PluginError if the model is not installed, is not allowed or does not accept these
    options.
    """
    if ":" not in name:
        function: Any = plugins.find_callable(plugins.MODELS, name)
        options = checked(function, options, of=f"model {name}")
    else:
        function = _named(name, model_modules)
        try:
            signature_of(function).bind(**options)
        except (TypeError, ValueError) as error:
            raise PluginError(f"model '{name}' can't be made with these options: {error}") from None

    def make() -> nn.Module:
        from torch import nn

        try:
            model = function(**options)
        except (TypeError, ValueError, RuntimeError) as error:
            text = " ".join(str(error).split())
            raise PluginError(f"model '{name}' can't be made: {text}", name=name) from error
        if not isinstance(model, nn.Module):
            raise PluginError(
                f"model '{name}' creates an object of the class {type(model).__name__}; it must "
                "create a torch.nn.Module",
                name=name,
            )
        return model

    return make


def _named(name: str, model_modules: Sequence[str]) -> Any:
    """Return the object that MODULE:NAME names. Raises PluginError."""
    module_name, _, attribute = name.partition(":")
    allowed = any(
        module_name == each or module_name.startswith(f"{each}.") for each in model_modules
    )
    if not allowed:
        raise PluginError(
            f"model '{name}' is in a module that `model_modules` of this machine's configuration "
            "does not list; add the module there (listed now: "
            f"{', '.join(model_modules) or 'none'})",
            name=name,
        )
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"model '{name}' is not installed on this machine: {error}; install the model on the "
            "coordinator's machine and on every host",
            name=name,
        ) from error
    except Exception as error:  # a module may raise anything while it is imported
        text = " ".join(str(error).split())
        raise PluginError(
            f"the module of model '{name}' can't be imported: {type(error).__name__}: {text}; "
            "check that the module is compatible with the installed version of torch",
            name=name,
        ) from error
    # Refuse objects that the module has only imported from another module.
    home = getattr(function, "__module__", None) or ""
    if not callable(function) or home.partition(".")[0] != module_name.partition(".")[0]:
        raise PluginError(
            f"'{name}' is not a function or class that the package of '{module_name}' defines; "
            "name the function or class that creates the model",
            name=name,
        )
    return function
