"""Plug-ins that the coordinator names in a message, by a name and options as JSON."""

from __future__ import annotations

import json

from pydantic import ValidationError

from potluck.common.errors import ConfigurationError
from potluck.common.settings import plugins
from potluck.common.settings.model_table import ModelTable
from potluck.common.settings.plugins import PluginType
from potluck.rpc.v1 import coordinator_pb2 as rpc


def created(kind: type[PluginType], plugin: rpc.Plugin) -> PluginType:
    """Make the plug-in that a message names; `kind` is its base class.

    Raises PluginError, ConfigurationError.
    """
    return plugins.create(kind, plugin.name, options_of(plugin))


def options_of(plugin: rpc.Plugin) -> dict[str, object]:
    """Return a plug-in's options. Raises ConfigurationError if they are not a JSON object."""
    return json_object(plugin.options_json, f"options of '{plugin.name}'")


def model_table_of(plugin: rpc.Plugin) -> ModelTable | None:
    """Return the table `[model]` of a task's run, or None. Raises ConfigurationError."""
    what = f"model of '{plugin.name}'"
    values = json_object(plugin.model_json, what)
    try:
        return ModelTable.model_validate(values) if values else None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{what}: {where}: {first['msg']}"[:300]) from None


def json_object(text: str, what: str) -> dict[str, object]:
    """Parse a JSON object; empty text gives {}. Raises ConfigurationError, which names `what`."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{what}: not a JSON object: {text[:80]!r}")
    return value
