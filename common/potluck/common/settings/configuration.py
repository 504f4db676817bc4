"""Configuration files: TOML read into frozen pydantic models, with one clear line per mistake.

Every field has a description. `annotated_example` turns a model into the commented file that
`potluck-server config` and similar commands print.
"""

from __future__ import annotations

import codecs
import functools
import os
import re
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from potluck.common.errors import ConfigurationError
from potluck.common.settings.configuration_errors import explain, nested
from potluck.common.settings.old_spelling import current_keys


class Settings(BaseModel):
    """A table of a configuration file. It is immutable, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    kind: ClassVar[str] = ""
    """Name of this kind of file, for messages; empty for a table inside a file."""

    old_keys: ClassVar[Mapping[str, str]] = {}
    """Old → new name of each renamed top-level key; files may still have the old names."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_for_a_truth(cls, value: object, info: ValidationInfo) -> object:
        """Refuse a boolean for a number, and a number for a boolean, which pydantic would
        convert."""
        wanted = _number_or_truth(cls)[str(info.field_name)]
        if wanted == "number":
            values = value if isinstance(value, (list, tuple)) else [value]
            if bool in map(type, values):
                raise ValueError("must be a number, not true or false")
        if wanted == "truth" and type(value) in (int, float):
            raise ValueError("must be true or false")
        return value


@functools.lru_cache(maxsize=256)
def _number_or_truth(model: type[Settings]) -> Mapping[str, Literal["number", "truth", ""]]:
    """Return, by field, whether it is a number or a boolean; empty for other types, or if both are
    allowed."""
    found: dict[str, Literal["number", "truth", ""]] = {}
    for name, field in model.model_fields.items():
        leaves = _leaves(field.annotation)
        number = bool({int, float} & leaves) and bool not in leaves
        found[name] = "number" if number else "truth" if leaves == {bool} else ""
    return found


def _leaves(annotation: object) -> set[object]:
    """Return the types that occur in an annotation, except None."""
    arguments = get_args(annotation)
    if not arguments:
        return {annotation} - {type(None)}
    return set[object]().union(*map(_leaves, arguments))


_COMMENT_WIDTH: Final = 88

RECOMMENDED: Final[dict[str, JsonValue]] = {"recommended": True}
"""Value of `json_schema_extra` that marks a table whose defaults come from a recommendation."""

SettingsType = TypeVar("SettingsType", bound=Settings)
ModelType = TypeVar("ModelType", bound=BaseModel)


def parse(
    model: type[SettingsType],
    text: str,
    *,
    source: str,
    overrides: Mapping[str, object] | None = None,
) -> SettingsType:
    """Return a configuration from TOML text. source: name of the text in errors.

    overrides: values for top-level fields, which replace the text's values; a value of None has no
    effect.
    """
    values = parse_toml(text, source=source)
    values |= {key: value for key, value in (overrides or {}).items() if value is not None}
    return validate(model, values, source=source)


_MOST_LEVELS: Final = 50
"""Maximum nesting of lists and tables, so that no later code recurses too deeply."""


def parse_toml(text: str, *, source: str) -> dict[str, Any]:
    """Return the values of TOML text. Raises ConfigurationError. source: name of the text in
    errors."""
    try:
        values = tomllib.loads(text)
        _check_levels(values)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{source}: not valid TOML: {_toml_fault(error)}", source=source
        ) from None
    return values


def _check_levels(value: object, level: int = 0) -> None:
    """Raise RecursionError if lists and tables are nested too deeply, and ValueError if an integer
    is too large to be shown."""
    if level > _MOST_LEVELS:
        raise RecursionError
    if isinstance(value, int):
        str(value)  # fails for a long hexadecimal number
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            _check_levels(each, level + 1)


def _toml_fault(error: ValueError | RecursionError) -> str:
    """Return a description of the error in invalid TOML, with its place if it is known.

    Duplicate keys and tables are described in Potluck's own words.
    """
    if isinstance(error, RecursionError):
        return f"lists and tables have more than {_MOST_LEVELS} levels; use fewer levels"
    if not isinstance(error, tomllib.TOMLDecodeError):
        return "an integer has thousands of digits; write a smaller number"
    said = str(error).replace("Cannot overwrite a value", "a key is set twice")
    twice = re.match(r"Cannot declare \((.*?),?\) twice", said)
    if twice is None:
        return said
    table = ".".join(part.strip(" '\"") for part in twice[1].split(","))
    return f"table [{table}] is defined twice{said[twice.end() :]}"


def validate(model: type[SettingsType], values: Mapping[str, Any], *, source: str) -> SettingsType:
    """Return a configuration from plain values. source: name of the values in errors."""
    values = current_keys(values, model.old_keys, source=source)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        text = explain(model, error, values, kind=model.kind)
        raise ConfigurationError(f"{source}: {text}", source=source) from None


def decode(data: bytes, *, source: str) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark. Raises
    ConfigurationError if the file is not UTF-8."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:64]:
        raise ConfigurationError(
            f"{source}: the file is UTF-16 text, or not text at all; save it as UTF-8 (in "
            "PowerShell: "
            "| Out-File -Encoding utf8)",
            source=source,
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{source}: the file is not UTF-8 text (byte {error.start}); save it as UTF-8",
            source=source,
        ) from None


def load(
    model: type[SettingsType],
    path: Path,
    *,
    environment_prefix: str,
    overrides: Mapping[str, object] | None = None,
) -> SettingsType:
    """Load a configuration file. Flags (`overrides`) have precedence over the environment, and the
    environment over the file.

    The environment variable of a top-level field is `PREFIX_FIELD` in upper case. Relative paths in
    the file are relative to the file's folder.
    """
    try:
        text = decode(path.read_bytes(), source=str(path))
    except OSError as error:
        raise ConfigurationError(
            f"can't read the configuration file {path}: {error.strerror}", path=path
        ) from None
    merged = environment(model, environment_prefix) | {
        key: value for key, value in (overrides or {}).items() if value is not None
    }
    settings = parse(model, text, source=str(path), overrides=merged)
    return _anchor(settings, path.resolve().parent, skip=merged)


def environment(model: type[Settings], prefix: str) -> dict[str, str]:
    """Return the values of top-level fields that the environment sets, also under old names."""
    known = (*model.model_fields, *model.old_keys)
    names = {name: f"{prefix}_{name.upper()}" for name in known}
    return {name: os.environ[key] for name, key in names.items() if key in os.environ}


def _anchor(settings: ModelType, folder: Path, skip: Mapping[str, object]) -> ModelType:
    """Return the same settings, with relative paths resolved against `folder`."""
    changed: dict[str, Any] = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if name in skip:
            continue
        if isinstance(value, Path) and not value.is_absolute():
            changed[name] = folder / value
        elif isinstance(value, BaseModel):
            changed[name] = _anchor(value, folder, {})
        elif isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
            changed[name] = tuple(_anchor(item, folder, {}) for item in value)
    return settings.model_copy(update=changed) if changed else settings


def annotated_example(
    model: type[Settings],
    examples: Mapping[str, str] | None = None,
    tables: Mapping[str, type[Settings]] | None = None,
) -> str:
    """Return a commented TOML file for a model: every field with its description and its default.

    examples: TOML values of required fields, by dotted name. tables: model of each table whose
    field accepts anything; such a table is treated as `RECOMMENDED`. If a field has a tuple of
    tables, the first one is shown. Commented out are: optional fields without a default value, all
    fields of a table that is marked `RECOMMENDED`, and optional tables without an example.
    """
    lines: list[str] = []
    _annotate(model, None, "", examples or {}, tables or {}, lines)
    return "\n".join(lines).strip() + "\n"


def _annotate(
    model: type[BaseModel],
    defaults: BaseModel | None,
    prefix: str,
    examples: Mapping[str, str],
    open_tables: Mapping[str, type[Settings]],
    lines: list[str],
    *,
    commented: bool = False,
) -> None:
    tables: list[str] = []
    mark = "# " if commented else ""
    for name, field in model.model_fields.items():
        default = _default(name, field, defaults)
        if nested(field) is not None or isinstance(default, dict):
            tables.append(name)  # TOML requires a table's own keys before its sub-tables
            continue
        lines += _comment(field)
        assignment = _assignment(name, default, examples.get(f"{prefix}{name}"))
        lines += [assignment if assignment.startswith("#") else mark + assignment, ""]
    for name in tables:
        field = model.model_fields[name]
        lines += _comment(field)
        several = get_origin(field.annotation) is tuple
        described = open_tables.get(f"{prefix}{name}")
        table, default = described or nested(field), _default(name, field, defaults)
        shown = any(key.startswith(f"{prefix}{name}.") for key in examples)
        none = default is None or default == ()
        absent = table is not None and none and not field.is_required() and not shown
        header = f"[[{prefix}{name}]]" if several else f"[{prefix}{name}]"
        if table is None:
            lines += [mark + header, ""]
            continue
        lines += [f"# {header}" if absent else header]
        first = default[0] if isinstance(default, tuple) and default else default
        inner = first if isinstance(first, BaseModel) else None
        commented = absent or described is not None or field.json_schema_extra == RECOMMENDED
        _annotate(
            table, inner, f"{prefix}{name}.", examples, open_tables, lines, commented=commented
        )


def _comment(field: FieldInfo) -> list[str]:
    """Return a field's description as comment lines, wrapped evenly."""
    return textwrap.wrap(
        " ".join((field.description or "").split()),
        width=_COMMENT_WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _default(name: str, field: FieldInfo, defaults: BaseModel | None) -> object:
    if defaults is not None:
        return getattr(defaults, name)
    if field.is_required():
        return None
    return field.get_default(call_default_factory=True, validated_data={})


def _assignment(name: str, default: object, example: str | None) -> str:
    if example is not None:
        return f"{name} = {example}"
    return f"# {name} =" if default is None else f"{name} = {_toml(default)}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
