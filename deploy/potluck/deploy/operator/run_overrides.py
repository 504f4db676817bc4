"""`-o KEY=VALUE`: a run file with some of its values replaced."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.runfile import OLD_KEYS
from potluck.common.settings.configuration import parse_toml
from potluck.common.settings.old_spelling import with_current_keys


def override(text: str, assignments: Sequence[str], *, source: str) -> str:
    """Return the TOML `text` with each `KEY=VALUE` set; comments are kept.

    KEY may be dotted (`training.epochs`); VALUE is TOML (`3`, `true`, `["a", "b"]`), or else a
    plain text. Old names of keys are replaced, with a warning. source: the file's name in errors.
    Raises ConfigurationError.
    """
    if not assignments:
        return text
    text = with_current_keys(text, OLD_KEYS)
    try:
        parse_toml(text, source=source)  # refuses what tomlkit can't parse, such as deep nesting
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise ConfigurationError(f"{source}: not valid TOML: {error}", source=source) from None
    for assignment in assignments:
        key, sign, value = assignment.partition("=")
        parts = [part.strip() for part in with_current_keys(f"{key}=", OLD_KEYS)[:-1].split(".")]
        if not sign or not all(parts):
            raise ConfigurationError(
                f"-o {assignment!r} is not KEY=VALUE; write, for example, -o training.epochs=3"
            )
        _set(document, parts, _value(value.strip()), assignment)
    return tomlkit.dumps(document)


def _set(table: MutableMapping[str, Any], parts: list[str], value: Any, assignment: str) -> None:
    for depth, part in enumerate(parts[:-1], start=1):
        if part not in table:
            table[part] = tomlkit.table()
        inner = table[part]
        if isinstance(inner, list) and len(inner) == 1:  # [[objective]] with a single table
            inner = inner[0]
        if not isinstance(inner, MutableMapping):
            known = ".".join(parts[:depth])
            raise ConfigurationError(
                f"-o {assignment!r}: setting '{known}' is a value, not a table; write -o "
                f"{known}=VALUE"
            )
        table = inner
    table[parts[-1]] = value


def _value(text: str) -> Any:
    try:
        return tomlkit.value(text)
    except (TOMLKitError, ValueError, RecursionError):
        return text
