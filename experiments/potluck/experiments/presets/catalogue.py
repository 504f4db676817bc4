"""Lists all presets, and makes a run file from each."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, field_validator
from tomlkit.items import AoT

from potluck.common.errors import ConfigurationError
from potluck.common.settings.wanted import meant

# A preset -----------------------------------------------------------------------------------------


class Assumption(BaseModel):
    """A dotted key of the run file whose value we chose, and the reason for the value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    reason: str


class Preset(BaseModel):
    """A preset, read from a file of this folder.

    paper: the paper and its data set. run: contents of the run file, without seed and name.
    disclosure: settings that hosts need in their [disclosure] table in addition to its defaults.
    assumptions: reasons by key of the run file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    paper: str
    run: Mapping[str, Any]
    disclosure: Mapping[str, Any] = Field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()

    @field_validator("assumptions", mode="before")
    @classmethod
    def _from_table(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return tuple({"key": key, "reason": reason} for key, reason in value.items())


# All presets --------------------------------------------------------------------------------------

_FOLDER = resources.files("potluck.experiments.presets")
_ENDING = ".toml"


def preset_names() -> list[str]:
    """Return the names of all presets."""
    names = (each.name for each in _FOLDER.iterdir())
    return sorted(name.removesuffix(_ENDING) for name in names if name.endswith(_ENDING))


def preset_named(name: str) -> Preset:
    """Return a preset. Raises ConfigurationError with the known names if it does not exist."""
    if name not in preset_names():
        raise ConfigurationError(
            f"unknown preset '{name}'{meant(name, preset_names())}; presets: "
            f"{', '.join(preset_names())}",
            name=name,
        )
    text = (_FOLDER / f"{name}{_ENDING}").read_text(encoding="utf-8")
    return Preset.model_validate({"name": name, **tomllib.loads(text)})


def preset_run_file(preset: Preset) -> str:
    """Return the run file of a preset; a comment states the reason of each assumption."""
    document = tomlkit.document()
    document.add(tomlkit.comment(preset.paper))
    if preset.disclosure:
        allowed = tomlkit.dumps(preset.disclosure).strip().replace("\n", ", ")
        document.add(
            tomlkit.comment(f"Hosts must allow these disclosures in [disclosure]: {allowed}")
        )
    reasons = {each.key: each.reason for each in preset.assumptions}
    for key, value in preset.run.items():
        if not isinstance(value, Mapping):
            _add(document, key, value, reasons.pop(key, None))
    for key, table in preset.run.items():
        if isinstance(table, Mapping):
            inner = tomlkit.table()
            for name, value in table.items():
                _add(inner, name, value, reasons.pop(f"{key}.{name}", None))
            for name in [name for name in reasons if name.startswith(f"{key}.")]:
                assumed = f"{name.partition('.')[2]}: assumed: {reasons.pop(name)}"
                inner.add(tomlkit.comment(assumed))
            document.add(key, inner)
    return tomlkit.dumps(document)


def _add(table: Any, key: str, value: Any, reason: str | None) -> None:
    item = tomlkit.item(value)
    if reason is not None and isinstance(item, AoT):  # an array of tables has no line for it
        table.add(tomlkit.comment(f"{key}: assumed: {reason}"))
    elif reason is not None:
        item.comment(f"assumed: {reason}")
    table.add(key, item)
