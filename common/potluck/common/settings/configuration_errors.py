"""Errors of configuration files, in one line for users.

An error names the first few problems, and counts the others. If a file is meant for another
program, its keys show this.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from potluck.common.settings.wanted import any_of, meant, wanted

_SHOWN = 3
_LONGEST_VALUE = 80
_LONGEST_MESSAGE = 300
_NO_TABLE = {"model_type", "dict_type", "model_attributes_type"}
_OF_KEYS = {"missing", "extra_forbidden"}

RUN = "a run file"
COORDINATOR = "the configuration of a coordinator"
HOST = "the configuration of a host"
RELAY = "the configuration of a relay"
OPERATOR = "an operator's configuration"
EXPERIMENT = "an experiment file"
INVENTORY = "an inventory"

_TELLING: Sequence[tuple[str, Collection[str], Collection[str]]] = (
    (INVENTORY, {"machines"}, ()),
    (EXPERIMENT, {"axes"}, ()),
    (EXPERIMENT, {"seeds", "run"}, ()),
    (HOST, {"coordinator", "clients"}, {"rounds"}),
    (RELAY, {"coordinator", "listen"}, ()),
    (OPERATOR, {"coordinator", "tls"}, {"clients", "state_directory"}),
    (COORDINATOR, {"state_directory", "tls"}, {"coordinator", "clients"}),
    (COORDINATOR, {"listen"}, ()),
    (RUN, {"task"}, ()),
    (RUN, {"rounds", "clients_per_round"}, ()),
    (RUN, {"rounds", "count"}, ()),
)
"""Kinds of file, each with keys that it has and keys that it lacks; the first match is used."""


@dataclass(frozen=True, slots=True)
class ReadLater:
    """Annotates a field of a file whose table is read later. The argument is the table's model."""

    model: type[BaseModel]


def kind_of(keys: Iterable[str]) -> str | None:
    """Return the kind of file that has these top-level keys; None if no kind fits."""
    found = set(keys)
    for kind, needed, absent in _TELLING:
        if found.issuperset(needed) and found.isdisjoint(absent):
            return kind
    return None


def explain(
    model: type[BaseModel], error: ValidationError, values: Mapping[str, Any], *, kind: str
) -> str:
    """Return the message for `error` in `values`, which were read as `model`.

    kind: kind of the file; empty if the values are not from a file.
    """
    details = _in_file(error, values)
    looks_like = kind_of(values)
    problems = _problems(model, details, hints=looks_like in (None, kind))
    left = len(problems) - _SHOWN
    text = "; ".join(problems[:_SHOWN]) + (f"; and {left} more" if left > 0 else "")
    misplaced = any(each["type"] in ("extra_forbidden", "missing") for each in details)
    if kind and looks_like not in (None, kind) and misplaced:
        return f"this looks like {looks_like}, not {kind}: {text}"
    return text


def problems_by_key(
    model: type[BaseModel], error: ValidationError, values: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return each problem of `error` in `values` as (dotted key, sentence). The key is empty if the
    problem concerns the whole file."""
    found = []
    for same in _by_place(_in_file(error, values)):
        detail = same[0]
        if detail["type"] == "extra_forbidden":
            text = _unknown(model, detail["loc"][:-1], [_dotted(detail["loc"])], hints=True)
        else:
            text = _explained(model, same)
        key = ".".join(str(part) for part in detail["loc"] if not isinstance(part, int))
        found.append((key, text))
    return list(dict.fromkeys(found))


def _in_file(error: ValidationError, values: Mapping[str, Any]) -> list[ErrorDetails]:
    """Return the details of an error, each with its place in the file.

    Omits a second report: pydantic counts only valid entries, so it may also report a list with an
    invalid entry as too short.
    """
    details = error.errors(include_url=False)
    places = [detail["loc"] for detail in details]
    return [
        {**detail, "loc": _place(detail["loc"], values, of_keys=detail["type"] in _OF_KEYS)}
        for detail in details
        if detail["type"] != "too_short"
        or not any(
            len(place) > len(detail["loc"]) and place[: len(detail["loc"])] == detail["loc"]
            for place in places
        )
    ]


def _place(
    location: tuple[int | str, ...], values: object, *, of_keys: bool
) -> tuple[int | str, ...]:
    """Return the location in the file for a location from pydantic.

    pydantic adds type names for unions, and indices of lists that exist only after validation;
    these are removed. of_keys: True if the last part is a key, which may be missing in the file.
    """
    found: list[int | str] = []
    for position, part in enumerate(location):
        if isinstance(values, Mapping):
            there, inner = part in values, values.get(part)
        elif isinstance(values, (list, tuple)):
            there = isinstance(part, int) and part < len(values)
            inner = values[part] if isinstance(part, int) and there else None
        else:
            there, inner = False, None
        if there:
            values = inner
        if there or (of_keys and position == len(location) - 1):
            found.append(part)
    return tuple(found)


def _by_place(details: Sequence[ErrorDetails]) -> list[list[ErrorDetails]]:
    """Group details by place: a value of a union has one detail for each type that it may have."""
    found: dict[object, list[ErrorDetails]] = {}
    for detail in details:
        found.setdefault((detail["loc"], detail["type"] in _OF_KEYS), []).append(detail)
    return list(found.values())


def _problems(model: type[BaseModel], details: Sequence[ErrorDetails], *, hints: bool) -> list[str]:
    """Return one sentence for each problem. All unknown keys of a table have one sentence together.

    hints: True to suggest what was meant by an unknown key.
    """
    unknown: dict[tuple[int | str, ...], list[str]] = {}
    for detail in details:
        if detail["type"] == "extra_forbidden":
            unknown.setdefault(detail["loc"][:-1], []).append(_dotted(detail["loc"]))
    found = [_unknown(model, table, keys, hints=hints) for table, keys in unknown.items()] + [
        _explained(model, same)
        for same in _by_place(details)
        if same[0]["type"] != "extra_forbidden"
    ]
    return list(dict.fromkeys(found))


def _unknown(
    model: type[BaseModel], table: tuple[int | str, ...], keys: Sequence[str], *, hints: bool
) -> str:
    shown = ", ".join(f"'{_cut(key)}'" for key in keys[:_SHOWN])
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    known = _known_keys(model, table)
    hint = _hint(model, keys[0].rpartition(".")[2], known) if len(keys) == 1 else ""
    listed = f"; known keys: {', '.join(known)}" if hints and known else ""
    return f"unknown key{'s' * (len(keys) > 1)} {shown}{more}{hint}{listed}"


def _hint(model: type[BaseModel], key: str, known: Sequence[str]) -> str:
    """Return a hint that names the table where the key belongs, or else the key that was probably
    meant. Return an empty text if neither is known."""
    places = ["at the top of the file"] if key in model.model_fields else []
    places += [f"below [{table}]" for table in _tables_with(model, key)]
    if not 1 <= len(places) <= _SHOWN:
        return meant(key, known)
    return f" (it belongs {' or '.join(places)})"


def _tables_with(model: type[BaseModel], key: str, within: str = "") -> list[str]:
    """Return the dotted names of the tables of a file that have this key."""
    found = []
    for name, field in model.model_fields.items():
        later = [each.model for each in field.metadata if isinstance(each, ReadLater)]
        inner = nested(field) or next(iter(later), None)
        if inner is None:
            continue
        table = within + (field.alias or name)
        found += [table] if key in inner.model_fields else []
        found += _tables_with(inner, key, f"{table}.")
    return found


def _explained(model: type[BaseModel], same: Sequence[ErrorDetails]) -> str:
    """Return the sentence for the problem at one place.

    same: details about this place; several if the value may have several types and fits none.
    """
    detail = same[0]
    where = _cut(_dotted(detail["loc"])) or "the file"
    if detail["type"] == "missing":
        return f"'{where}' is missing"
    shown, given = repr(detail["input"]), detail["input"]
    value = f" (got {_cut(shown)})"
    if isinstance(given, Mapping) and len(shown) > _LONGEST_VALUE:
        value = ""  # showing the start of a large table does not help
    if len(same) == 1 and detail["type"] in _NO_TABLE:
        return f"'{where}' must be a table{value}; {_as_table(model, detail, where)}"
    message = any_of(map(wanted, same))
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE] + "…"
    return f"'{where}': {message}{value}"


def _as_table(model: type[BaseModel], detail: ErrorDetails, where: str) -> str:
    """Return advice on how to write a table, if something else was given in its place."""
    keys, given = _known_keys(model, detail["loc"]), detail["input"]
    if keys == ["name"]:  # the table is a plug-in: all other keys are its options
        name = given if isinstance(given, str) and len(given) <= _LONGEST_VALUE else "…"
        return f"write {where}.name = {json.dumps(name, ensure_ascii=False)}"
    return f"write its keys below [{where}]" + (f": {', '.join(keys)}" if keys else "")


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "…"


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        if isinstance(part, int):  # an index: the field has a list of tables
            continue
        field = model.model_fields.get(str(part))
        inner = nested(field) if field else None
        if inner is None:
            return []
        model = inner
    return sorted(field.alias or name for name, field in model.model_fields.items())


def nested(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that contains one or several tables; None for other fields."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
