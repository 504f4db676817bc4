"""Plug-in classes defined in a notebook or script, for a local federation's processes.

A selector, strategy, objective or task that no installed package offers is written into a folder as
a package. The package has an entry point for each class, and is found through PYTHONPATH. The
classes are pickled by value, for processes of the same user. All modules that they import must be
importable there.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from potluck.common.errors import PluginError
from potluck.common.settings.extras import extra_named
from potluck.common.settings.option_checks import checked
from potluck.common.settings.plugins import KINDS, Plugin, create

_MODULE = "potluck_session"
_LOADER = '''\
"""Plug-ins defined where a federation was started."""

import pickle
from pathlib import Path

globals().update(pickle.loads(Path(__file__).with_name("classes.pickle").read_bytes()))
'''
_METADATA = f"Metadata-Version: 2.1\nName: {_MODULE.replace('_', '-')}\nVersion: 0\n"

PluginType = TypeVar("PluginType", bound=Plugin)


class SessionPlugins:
    """The classes of this process that the federation's processes must load."""

    def __init__(self) -> None:
        self._classes: dict[tuple[str, str], type[Any]] = {}

    def table(self, group: str, value: object) -> Any:
        """Return the run file's table for a plug-in. value: its name, table, class, or instance.

        A class that no package offers is registered here, under its name in lower case with
        hyphens. The options of an instance are read from the attributes that store them. Raises
        PluginError if the instance does not store an option, for any other value, or if the name is
        taken.
        """
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping):
            return self._named(group, value)
        if not isinstance(value, type | Plugin) or getattr(value, "__module__", "") == "builtins":
            raise PluginError(
                f"{value!r} can't be used as {KINDS[group]}; give a name, a table with its name "
                "and options, a class, or an object of a class"
            )
        cls = value if isinstance(value, type) else type(value)
        options = {} if isinstance(value, type) else _options_of(value)
        return {"name": self._name(group, cls), **options}

    def _named(self, group: str, table: Mapping[str, object]) -> dict[str, object]:
        """Return the table with its name; if the name is a class, register it."""
        name = table.get("name")
        if isinstance(name, type):
            return {**table, "name": self._name(group, name)}
        return dict(table)

    def _name(self, group: str, cls: type[Any]) -> str:
        value = f"{cls.__module__}:{cls.__qualname__}"
        for point in entry_points(group=group):
            if point.value == value:
                return point.name
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()
        if any(point.name == name for point in entry_points(group=group)):
            raise PluginError(
                f"the name '{name}' of class {cls.__name__} is taken by a "
                f"{group.rpartition('.')[2]} plug-in of an installed package; rename the class",
                name=name,
            )
        self._classes[group, name] = cls
        return name

    def make(self, kind: type[PluginType], name: str, options: Mapping[str, object]) -> PluginType:
        """Make the plug-in as the federation's processes do. Raises PluginError."""
        cls = self._classes.get((kind.group, name))
        if cls is None:
            return create(kind, name, options)
        made = cls(**checked(cls, options, of=name))
        if not isinstance(made, kind):
            raise PluginError(
                f"{name} is not derived from {kind.__name__}; derive class {cls.__name__} from "
                f"{kind.__name__}"
            )
        return made

    def has(self, group: str, name: str) -> bool:
        """Return True if the plug-in of this name is a class of this process."""
        return (group, name) in self._classes

    def write(self, folder: Path) -> str:
        """Write the classes into a folder for PYTHONPATH; return a digest of them.

        If there are no classes, write nothing and return an empty text. Raises PluginError for a
        class that can't be pickled.
        """
        if not self._classes:
            return ""
        with extra_named():
            import cloudpickle  # only needed for plug-ins defined in this process

        try:
            pickled: bytes = cloudpickle.dumps(
                {_attribute(*key): cls for key, cls in self._classes.items()}
            )
        except (TypeError, AttributeError, ValueError) as error:
            names = ", ".join(sorted(cls.__name__ for cls in self._classes.values()))
            raise PluginError(
                f"the classes {names} can't be sent to the federation's processes: {error}; the "
                "classes may use only modules, functions, classes and plain values"
            ) from error
        points = "\n".join(
            f"[{group}]\n{name} = {_MODULE}:{_attribute(group, name)}"
            for group, name in self._classes
        )
        digest = sha256(pickled + points.encode()).hexdigest()
        package = folder / digest[:16]
        if not package.exists():
            draft = folder / f"{digest[:16]}.new"
            shutil.rmtree(draft, ignore_errors=True)
            information = draft / f"{_MODULE}-0.dist-info"
            information.mkdir(parents=True, mode=0o700)
            (draft / f"{_MODULE}.py").write_text(_LOADER)
            (draft / "classes.pickle").write_bytes(pickled)
            (information / "METADATA").write_text(_METADATA)
            (information / "entry_points.txt").write_text(points)
            draft.replace(package)
        return digest

    @staticmethod
    def search_path(folder: Path, digest: str) -> str:
        """Return the PYTHONPATH of the processes: the written classes and this process's path."""
        package = [str(folder / digest[:16])] if digest else []
        return ":".join([*package, *(entry or str(Path.cwd()) for entry in sys.path)])


def _attribute(group: str, name: str) -> str:
    return f"{group.rpartition('.')[2]}_{re.sub('[^a-z0-9]', '_', name)}"


def _options_of(plugin: object) -> dict[str, object]:
    """Return the options with which a plug-in instance was created, except defaults."""
    options = dict[str, object]()
    for name, parameter in signature(type(plugin)).parameters.items():
        for attribute in (name, f"_{name}"):
            if hasattr(plugin, attribute):
                value = getattr(plugin, attribute)
                break
        else:
            raise PluginError(
                f"{type(plugin).__name__} has no attribute '{name}' with the option's value; pass "
                'a table {"name": PLUG-IN, OPTION: VALUE} instead of the object',
                name=name,
            )
        if parameter.default is parameter.empty or value != parameter.default:
            options[name] = value
    return options
