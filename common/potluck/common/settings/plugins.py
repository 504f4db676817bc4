"""Finds and creates plug-ins by entry point: selectors, strategies, objectives, tasks, questions,
signals, sinks, commands.

A plug-in is a class whose constructor takes its options as keyword arguments and only stores them.
The annotations define which values are allowed. Built-in plug-ins are registered in the same way as
all others.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from abc import ABC
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import Any, ClassVar, Final, TypeVar, cast

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.settings.extras import MissingLibraryError, missing_library
from potluck.common.settings.option_checks import checked, signature_of
from potluck.common.settings.wanted import meant

SELECTORS = "potluck.selectors"
STRATEGIES = "potluck.strategies"
OBJECTIVES = "potluck.objectives"
CORRECTIONS = "potluck.corrections"
TASKS = "potluck.tasks"
MODELS = "potluck.models"
QUESTIONS = "potluck.questions"
SIGNALS = "potluck.signals"
SINKS = "potluck.sinks"
UPDATE_PATHS = "potluck.update_paths"
SECURE_SUMS = "potluck.secure_sums"
"""Entry-point group of the parts of secure aggregation, which the core loads by name."""
COMMANDS = "potluck.commands"
INTEGRATIONS = "potluck.integrations"
"""Entry-point group of classes and functions that need an extra; the core loads them by name."""

KINDS: Final = {
    SELECTORS: "selector",
    STRATEGIES: "strategy",
    OBJECTIVES: "objective",
    CORRECTIONS: "correction",
    TASKS: "task",
    MODELS: "model",
    QUESTIONS: "question",
    SIGNALS: "signal",
    SINKS: "sink",
}
"""The noun for a plug-in of each group."""

MODEL_MODULES: Final = (
    "potluck.common.models",
    "potluck.experiments.models",
)
"""Modules from which a model may be named as MODULE:NAME, unless a machine's configuration lists
other modules.

Only Potluck's own modules: a function of another library may download and unpickle a file.
"""


_PREFIX: Final = "potluck."
"""Prefix of the names of all groups."""

# Minimum similarity for a suggestion. It is high because names of methods are alike: fedsgd is not
# a misspelt feddf.
_LIKENESS: Final = 0.75


class Plugin(ABC):
    """Common parent of the base classes of all plug-in kinds."""

    group: ClassVar[str]
    """The entry-point group of the kind."""


PluginType = TypeVar("PluginType", bound=Plugin)


def installed(group: str) -> list[str]:
    """Return the names of the plug-ins installed in a group, sorted."""
    return sorted({point.name for point in _entry_points(group, tuple(sys.path))})


@functools.lru_cache(maxsize=64)
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the installed plug-ins of a group. path: the folders to search, `sys.path`. If several
    have a package of the same name, the first one counts, as for modules."""
    packages: dict[str, tuple[EntryPoint, ...]] = {}
    for folder in path:
        for name, points in _packages_in(folder):
            packages.setdefault(name, points)
    return tuple(point for points in packages.values() for point in points if point.group == group)


@functools.lru_cache
def _packages_in(folder: str) -> list[tuple[str, tuple[EntryPoint, ...]]]:
    """Return the packages in a folder that offer plug-ins: name and entry points of each.

    Folders are cached one by one: a forked process with one folder more reads only that. Texts are
    searched before they are parsed, since a folder may have hundreds of packages.
    """
    return [
        (package.name, tuple(package.entry_points))
        for package in distributions(path=[folder])
        if f"[{_PREFIX}" in (package.read_text("entry_points.txt") or "")
    ]


def not_installed(group: str, name: str) -> PluginError:
    """Return the error for a plug-in name that this process does not know. It lists the known
    names."""
    if any(True for _ in entry_points(group=group, name=name)):
        return PluginError(
            f"{group}: '{name}' was installed after this process had started; restart the process",
            group=group,
            name=name,
        )
    choices = installed(group)
    return PluginError(
        f"{group}: '{name}' is not installed{meant(name, choices, likeness=_LIKENESS)}; "
        f"installed: {', '.join(choices) or 'nothing'}",
        group=group,
        name=name,
    )


def origin(group: str, name: str) -> str:
    """Return the MODULE:NAME of the plug-in called `name`; empty if it is not installed."""
    points = _entry_points(group, tuple(sys.path))
    return min((point.value for point in points if point.name == name), default="")


def package_of(group: str, name: str) -> str | None:
    """Return the package of the plug-in called `name` as "package version"; None if unknown."""
    return _package_of(group, name, tuple(sys.path))


@functools.lru_cache(maxsize=256)
def _package_of(group: str, name: str, path: tuple[str, ...]) -> str | None:
    """Return what `package_of` does; cached, since a package's whole metadata are parsed for it."""
    for point in _entry_points(group, path):
        if point.name == name and point.dist is not None:
            return f"{point.dist.name} {point.dist.version}"
    return None


def find(group: str, name: str) -> type[Any]:
    """Return the plug-in class called `name`.

    Raises PluginError if no package offers that name, if several do, or if it can't be imported.
    """
    found = find_callable(group, name)
    if not isinstance(found, type):
        raise PluginError(
            f"{group}: '{name}' is not a class; name a class in the entry point of its package",
            name=name,
        )
    return found


def find_callable(group: str, name: str) -> Callable[..., Any]:
    """Return the class or function called `name`. Raises PluginError under the conditions of
    `find`."""
    offered: dict[str, EntryPoint] = {
        point.value: point for point in _entry_points(group, tuple(sys.path)) if point.name == name
    }
    if not offered:
        raise not_installed(group, name)
    if len(offered) > 1:
        origins = " and ".join(sorted(offered))
        raise PluginError(
            f"{group}: several packages offer '{name}': {origins}; uninstall all but one",
            group=group,
            name=name,
        )
    point = next(iter(offered.values()))
    try:
        found = point.load()
    except Exception as error:  # the package's own code runs
        known = isinstance(error, (ImportError, AttributeError))
        cause = missing_library(error) or (error if known else f"{type(error).__name__}: {error}")
        raise PluginError(
            f"{group}: '{name}' can't be loaded from {point.value}: {cause}", group=group, name=name
        ) from error
    if not callable(found):
        raise PluginError(
            f"{group}: '{name}' ({point.value}) is not a class or function; correct the entry "
            "point of its package",
            name=name,
        )
    return cast("Callable[..., Any]", found)


def is_present(group: str, name: str) -> bool:
    """Return whether the code of the plug-in called `name` is on this machine. The code is not
    loaded.

    A container image may lack a package that Potluck's entry points name.
    """
    points = [point for point in _entry_points(group, tuple(sys.path)) if point.name == name]
    try:
        return any(importlib.util.find_spec(point.module) is not None for point in points)
    except ModuleNotFoundError:  # its package is missing
        return False


def integration(name: str) -> Callable[..., Any]:
    """Return the class or function called `name` in the group `INTEGRATIONS`.

    Raises MissingLibraryError if a library that it needs is missing; otherwise the errors of
    `find`.
    """
    try:
        return find_callable(INTEGRATIONS, name)
    except PluginError as error:
        why = missing_library(error.__cause__)
        if why is None:
            raise
        raise MissingLibraryError(why) from error


def options_of(group: str, name: str) -> list[str]:
    """Return the names of the options that the plug-in called `name` takes. Raises PluginError."""
    return list(signature_of(find(group, name)).parameters)


def create(kind: type[PluginType], name: str, options: Mapping[str, object]) -> PluginType:
    """Return an instance of the plug-in called `name`. kind: base class of its kind.

    A class that does not derive from `kind` gets those attributes of `kind` that it does not
    define. Raises PluginError if an option is unknown or its value is refused.
    """
    found: Any = find(kind.group, name)
    try:
        cls = found if issubclass(found, kind) else _with_defaults(found, kind)
    except TypeError as error:
        raise PluginError(
            f"{KINDS[kind.group]} {name}: {error}; derive it from {kind.__name__}", name=name
        ) from error
    return cast(PluginType, _made(kind.group, name, cls, options))


def check(group: str, name: str, options: Mapping[str, object]) -> None:
    """Raise PluginError if `create` would. Use it where the base class of the kind can't be
    imported."""
    _made(group, name, find(group, name), options)


@functools.lru_cache(maxsize=64)
def _with_defaults(cls: Any, kind: type[Plugin]) -> type[Any]:
    """Return the class, extended by the attributes of its kind's base class that it does not
    define."""
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (cls, kind), exec_body=lambda body: body.update(names))


def _made(group: str, name: str, cls: type[Any], options: Mapping[str, object]) -> Any:
    of = f"{KINDS[group]} {name}"
    arguments = checked(cls, options, of=of)
    try:
        return cls(**arguments)
    except MissingLibraryError as error:
        raise PluginError(f"{of}: {error.message}", name=name) from error
    except ConfigurationError:
        raise
    except (TypeError, ValueError) as error:
        raise PluginError(f"{of}: {error}", name=name) from error
