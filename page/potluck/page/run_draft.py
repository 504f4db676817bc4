"""A run file that the operator is writing: the form's fields, problems by key and line. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import tomlkit
from pydantic import BaseModel, ValidationError

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.run_settings import RoundPolicy
from potluck.common.run_file.runfile import OLD_KEYS, RunFile
from potluck.common.settings.configuration import parse_toml
from potluck.common.settings.configuration_errors import RUN, explain, problems_by_key
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.old_spelling import current_keys, with_current_keys
from potluck.common.settings.plugins import OBJECTIVES, SELECTORS, STRATEGIES, TASKS, installed
from potluck.deploy.operator.run_overrides import override
from potluck.page.page_shapes import DraftShown, FieldShown, Problem

FIRST_DRAFT = """\
name = "first-look"
rounds = 30
clients_per_round = 9

[task]
name = "colored-digits"

[selector]
name = "uniform"

[strategy]
name = "fedavg"
"""
"""The form's initial run file."""

_SOURCE = "the run file"


@dataclass(frozen=True, kw_only=True)
class _Field:
    key: str
    label: str
    kind: Literal["text", "integer", "number"]
    model: type[BaseModel]
    group: str = ""


_FIELDS: Final = (
    _Field(key="name", label="Name", kind="text", model=RunFile),
    _Field(key="task.name", label="Task", kind="text", model=RunFile, group=TASKS),
    _Field(key="selector.name", label="Selector", kind="text", model=RunFile, group=SELECTORS),
    _Field(key="strategy.name", label="Strategy", kind="text", model=RunFile, group=STRATEGIES),
    _Field(key="objective.name", label="Objective", kind="text", model=RunFile, group=OBJECTIVES),
    _Field(key="rounds", label="Rounds", kind="integer", model=RunFile),
    _Field(key="clients_per_round", label="Clients per round", kind="integer", model=RunFile),
    _Field(key="expected_clients", label="Expected clients", kind="integer", model=RunFile),
    _Field(key="seed", label="Seed", kind="integer", model=RunFile),
    _Field(key="training.epochs", label="Local epochs", kind="integer", model=LocalTraining),
    _Field(key="training.batch_size", label="Batch size", kind="integer", model=LocalTraining),
    _Field(key="training.learning_rate", label="Learning rate", kind="number", model=LocalTraining),
    _Field(key="round.deadline_seconds", label="Deadline", kind="number", model=RoundPolicy),
)
_GROUP_OF: Final = {field.group: field.key for field in _FIELDS if field.group}
_TASKS_OWN: Final = "the task's own"


def form_fields() -> list[FieldShown]:
    """Return the form's fields, with the run file's hints and defaults, and installed plug-ins."""
    return [
        FieldShown(
            key=field.key,
            label=field.label,
            hint=_hint(field),
            kind=field.kind,
            choices=installed(field.group) if field.group else [],
            default=_default(field),
        )
        for field in _FIELDS
    ]


def _hint(field: _Field) -> str:
    name = field.key.removesuffix(".name").rpartition(".")[2]
    description = (field.model.model_fields[name].description or "").replace("`", "")
    return " ".join(description.split("; other keys")[0].rstrip(".").split()) + "."


def _default(field: _Field) -> str:
    if field.key.startswith("training."):
        return _TASKS_OWN
    name = field.key.removesuffix(".name").rpartition(".")[2]
    default = field.model.model_fields[name].get_default(call_default_factory=False)
    if isinstance(default, tuple):
        default = default[0]
    found = getattr(default, "name", default)
    return "" if field.key == "task.name" else str(found)


def drafted(text: str, changes: Mapping[str, str]) -> DraftShown:
    """Write fields of the form into a run file. An empty field removes its key; comments stay.

    If the file is not valid TOML, return it unchanged with the problem.
    """
    try:
        changed = _changed(with_current_keys(text, OLD_KEYS), changes)
    except ConfigurationError as error:
        problem = _refusal(text, _read(text)[0], error.message)
        return DraftShown(run_file=text, values={}, problems=[problem])
    values, problems = _read(changed)
    return DraftShown(run_file=changed, values=values, problems=problems)


def _changed(text: str, changes: Mapping[str, str]) -> str:
    kinds = {field.key: field.kind for field in _FIELDS}
    for key, value in changes.items():
        if value.strip():
            written = json.dumps(value, ensure_ascii=False) if kinds.get(key) == "text" else value
            text = override(text, [f"{key}={written}"], source=_SOURCE)
        else:
            text = _without(text, key)
    return text


def _without(text: str, key: str) -> str:
    try:
        parse_toml(text, source=_SOURCE)  # refuses what tomlkit can't parse, such as deep nesting
        document = tomlkit.parse(text)
    except ValueError as error:
        raise ConfigurationError(f"{_SOURCE}: not valid TOML: {error}") from None
    table: Any = document
    *parents, last = key.split(".")
    for parent in parents:
        table = table.get(parent) if isinstance(table, MutableMapping) else None
        if isinstance(table, list) and len(table) == 1:
            table = table[0]
    if isinstance(table, MutableMapping):
        table.pop(last, None)
        if parents and not table:
            document.pop(parents[0], None)
    return tomlkit.dumps(document)


def _values(table: Mapping[str, Any]) -> dict[str, str]:
    found = {field.key: _at(table, field.key) for field in _FIELDS}
    return {key: _written(value) for key, value in found.items() if value is not None}


def _at(table: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(table, list) and len(table) == 1:
            table = table[0]
        table = table.get(part) if isinstance(table, Mapping) else None
    return None if isinstance(table, (Mapping, list)) else table


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


# Problems -----------------------------------------------------------------------------------------


def problems_of(text: str) -> list[Problem]:
    """Return the problems of a run file that can be found without the coordinator's plug-ins."""
    return _read(text)[1]


def _read(text: str) -> tuple[dict[str, str], list[Problem]]:
    """Return a run file's values in the form, and its problems; no values if it is not valid
    TOML."""
    try:
        table = parse_toml(text, source=_SOURCE)
    except ConfigurationError as error:
        return {}, [_refusal(text, {}, error.message)]
    values = _values(table)
    try:
        table = current_keys(table, OLD_KEYS, source=_SOURCE)
    except ConfigurationError as error:
        return values, [_refusal(text, values, error.message)]
    return values, [
        Problem(key=key, line=line_of(text, key), text=said) for key, said in _problems(table)
    ]


def _problems(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    training = values.get("training")
    try:
        RunFile.model_validate(values)
    except ValidationError as error:
        found = problems_by_key(RunFile, error, values)
        other = explain(RunFile, error, values, kind=RUN)
        if other.startswith("this looks like"):
            yield "", other
            return
        yield from found
    if isinstance(training, dict):
        known = {key: each for key, each in training.items() if key in LocalTraining.model_fields}
        try:
            LocalTraining.model_validate(known)
        except ValidationError as error:
            for key, said in problems_by_key(LocalTraining, error, known):
                yield f"training.{key}" if key else "training", said


def refused(text: str, message: str) -> list[Problem]:
    """Return the problems of a run file that the coordinator refused with `message`."""
    values, problems = _read(text)
    return problems or [_refusal(text, values, message)]


def _refusal(text: str, values: Mapping[str, str], message: str) -> Problem:
    """Return a message about a run file as a problem, with the field if the message names one.

    values: the file's values in the form.
    """
    at = re.search(r"at line (\d+)", message)
    if at:
        return Problem(key="", line=int(at[1]), text=message)
    for group, key in _GROUP_OF.items():
        kind = group.rpartition(".")[2].removesuffix("s").replace("ie", "y")
        if group in message or re.search(rf"\b{kind}s? '", message):
            return Problem(key=key, line=line_of(text, key), text=message)
    quoted = re.findall(r"'([\w.-]+)'", message)
    named = [key for key in _GROUP_OF.values() if values.get(key) in quoted]
    known = named + [key for key in quoted if line_of(text, key) is not None]
    key = known[0] if known else ""
    return Problem(key=key, line=line_of(text, key) if key else None, text=message)


def line_of(text: str, key: str) -> int | None:
    """Return the line, from 1, that sets a dotted TOML key or its table; None if no line does."""
    parts = key.split(".")
    table: Sequence[str] = ()
    header: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        opened = re.match(r"\s*\[\[?\s*([\w.\"'-]+)\s*\]", line)
        if opened:
            table = opened[1].split(".")
            if table == parts or table == parts[:-1]:
                header = header or number
        else:
            set_here = re.match(r"\s*([\w.\"'-]+)\s*=", line)
            if set_here:
                full = [*table, *set_here[1].split(".")]
                if full == parts or (len(full) < len(parts) and full == parts[: len(full)]):
                    return number
    return header
