"""Plug-ins by entry point: selectors, strategies, objectives, tasks, questions, commands.

A plug-in is a class whose constructor takes its options as keyword arguments and only stores
them. Built-in ones are registered the same way as anybody else's.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, cast

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.settings.extras import missing_library

SELECTORS = "potluck.selectors"
STRATEGIES = "potluck.strategies"
OBJECTIVES = "potluck.objectives"
CORRECTIONS = "potluck.corrections"
TASKS = "potluck.tasks"
MODELS = "potluck.models"
QUESTIONS = "potluck.questions"
COMMANDS = "potluck.commands"

MODEL_MODULES: Final = (
    "potluck.common.models",
    "potluck.experiments.models",
    "torchvision.models",
)
"""Modules of models named MODULE:NAME, unless a machine's configuration lists others."""


def installed(group: str) -> list[str]:
    """Names of the plug-ins installed in a group, sorted."""
    return sorted({point.name for point in _entry_points(group, tuple(sys.path))})


@functools.lru_cache(maxsize=64)
def _entry_points(group: str, _path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Installed plug-ins, kept: reading them from disk takes milliseconds, and every round asks."""
    return tuple(entry_points(group=group))


def not_installed(group: str, name: str) -> PluginError:
    """The line for a name that this process does not know, with those that it does."""
    if any(True for _ in entry_points(group=group, name=name)):
        return PluginError(
            f"{group}: '{name}' was installed after this process had started; start it anew",
            group=group,
            name=name,
        )
    choices = ", ".join(installed(group)) or "nothing"
    return PluginError(
        f"{group}: '{name}' is not installed; installed: {choices}", group=group, name=name
    )


def origin(group: str, name: str) -> str:
    """Source of the plug-in called `name`, MODULE:NAME; empty if it is not installed."""
    return min((point.value for point in entry_points(group=group, name=name)), default="")


def find(group: str, name: str) -> type[Any]:
    """The plug-in class called `name`.

    Raises PluginError if none or several packages offer that name, or if it can't be imported.
    """
    found = find_callable(group, name)
    if not isinstance(found, type):
        raise PluginError(f"{group}: '{name}' is not a class", name=name)
    return found


def find_callable(group: str, name: str) -> Callable[..., Any]:
    """The class or function called `name`. Raises PluginError as `find` does."""
    offered: dict[str, EntryPoint] = {
        point.value: point for point in _entry_points(group, tuple(sys.path)) if point.name == name
    }
    if not offered:
        raise not_installed(group, name)
    if len(offered) > 1:
        origins = " and ".join(sorted(offered))
        raise PluginError(
            f"{group}: '{name}' is offered twice, by {origins}; uninstall one",
            group=group,
            name=name,
        )
    point = next(iter(offered.values()))
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        cause = missing_library(error) or error
        raise PluginError(
            f"{group}: '{name}' can't be loaded from {point.value}: {cause}", group=group, name=name
        ) from error
    if not callable(found):
        raise PluginError(f"{group}: '{name}' ({point.value}) can't be called", name=name)
    return cast("Callable[..., Any]", found)


def options_of(group: str, name: str) -> list[str]:
    """Names of the options that the plug-in called `name` takes. Raises PluginError."""
    return list(inspect.signature(find(group, name)).parameters)


def create(group: str, name: str, options: Mapping[str, object]) -> Any:
    """An instance of the plug-in called `name` with these options.

    Raises PluginError for an option it does not have, or a value it refuses.
    """
    cls = find(group, name)
    signature = inspect.signature(cls)
    try:
        signature.bind(**options)
    except TypeError as error:
        valid = ", ".join(signature.parameters) or "none"
        raise PluginError(f"{group}: '{name}': {error}; its options: {valid}", name=name) from None
    for option, value in options.items():
        parameter = signature.parameters.get(option)
        if isinstance(value, bool) and parameter is not None and _wants_a_number(parameter):
            raise PluginError(
                f"{group}: '{name}': {option} must be a number, not {str(value).lower()}",
                name=name,
            )
    try:
        return cls(**options)
    except ConfigurationError:
        raise
    except (TypeError, ValueError) as error:
        raise PluginError(f"{group}: '{name}': {error}", name=name) from error


def _wants_a_number(parameter: inspect.Parameter) -> bool:
    """Return whether an option is annotated as a number and not as a bool."""
    words = set(re.findall(r"\w+", str(parameter.annotation)))
    return bool(words & {"int", "float"}) and not words & {"bool", "Any", "object"}
