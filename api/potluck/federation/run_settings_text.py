"""Makes a run file from the Python arguments of `Federation.run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import BaseModel

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.runfile import OLD_KEYS, RunFile, parse_run_file
from potluck.common.settings.configuration import parse_toml
from potluck.common.settings.old_spelling import current_keys

SOURCE = "the run's arguments"
"""Name of the arguments in error messages, in place of a file's."""


def run_table(run_file: str | Path | None, arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of `run_file`, overridden by each argument that is not None.

    run_file: a path, or a run file's text. An argument replaces the file's whole table of that
    name. Old names of keys are replaced, with a warning. Raises ConfigurationError.
    """
    values = {} if run_file is None else _read(run_file)
    given = {name: plain_value(value) for name, value in arguments.items() if value is not None}
    return current_keys(values, OLD_KEYS, source="the run file") | current_keys(
        given, OLD_KEYS, source=SOURCE
    )


def checked_text(values: Mapping[str, Any]) -> tuple[str, RunFile]:
    """Return the values as TOML text, and that text parsed. Raises ConfigurationError."""
    text = tomlkit.dumps(values)
    return text, parse_run_file(text, source=SOURCE)


def plain_value(value: object) -> Any:
    """Convert a value to types that TOML has: settings become tables, tuples become lists."""
    if isinstance(value, BaseModel):
        return plain_value(value.model_dump(exclude_unset=True))
    if isinstance(value, Mapping):
        return {str(key): plain_value(each) for key, each in value.items() if each is not None}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain_value(each) for each in value]
    return value


def _read(run_file: str | Path) -> dict[str, Any]:
    text, source = str(run_file), "the run file"
    if isinstance(run_file, Path) or "\n" not in text:
        try:
            text, source = Path(run_file).read_text(), f"the run file {run_file}"
        except OSError as error:
            raise ConfigurationError(
                f"can't read the run file {run_file}: {error.strerror}", path=run_file
            ) from None
    return parse_toml(text, source=source)
