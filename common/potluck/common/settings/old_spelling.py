"""Old spellings of settings: accepted until 0.2, each with a warning that names both spellings."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator, ValidationInfo

from potluck.common.errors import ConfigurationError

ACCEPTED_UNTIL = "0.2"
"""The first release that will refuse the old spellings."""

_KEY = re.compile(r"(?m)^([ \t]*)([\w-]+)(?=[ \t]*=)")
_TABLE = re.compile(r"(?m)^[ \t]*\[")


class OldSpellingWarning(FutureWarning):
    """A setting or an option has its old spelling."""


def warn_of_old_spelling(old: str, new: str, *, what: str = "key") -> None:
    """Warn that `old` is now spelled `new`. what: noun for the renamed part, such as "key"."""
    warnings.warn(
        f"{old} is written {new} now; the old {what} is accepted before version {ACCEPTED_UNTIL}",
        OldSpellingWarning,
        stacklevel=3,
    )


def old_spellings(replaced: Mapping[str, str]) -> BeforeValidator:
    """Return a validator for `Annotated` that replaces each old value, with a warning.

    replaced: old → new value.
    """

    def current(value: object, info: ValidationInfo) -> object:
        new = replaced.get(value) if isinstance(value, str) else None
        if new is None:
            return value
        name = info.field_name
        warn_of_old_spelling(f'{name} = "{value}"', f'{name} = "{new}"', what="word")
        return new

    return BeforeValidator(current)


def current_keys(
    values: Mapping[str, Any], replaced: Mapping[str, str], *, source: str
) -> dict[str, Any]:
    """Return a table with its old keys renamed, with a warning for each.

    replaced: old → new key. source: the table's name in errors. Raises ConfigurationError if the
    table has an old key and also its new one.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        new = replaced.get(key, key)
        if new != key and new in values:
            raise ConfigurationError(
                f"{source}: '{key}' is the old name of '{new}', and both are set; remove '{key}'",
                source=source,
            )
        if new != key:
            warn_of_old_spelling(f"'{key}'", f"'{new}'")
        found[new] = value
    return found


def with_current_keys(text: str, replaced: Mapping[str, str]) -> str:
    """Return a TOML text in which the old keys above its first table are renamed, with a warning
    for each.

    replaced: old → new key. Comments, order and values stay.
    """

    def renamed(match: re.Match[str]) -> str:
        key = match[2]
        if key not in replaced:
            return match[0]
        warn_of_old_spelling(f"'{key}'", f"'{replaced[key]}'")
        return match[1] + replaced[key]

    table = _TABLE.search(text)
    end = len(text) if table is None else table.start()
    return _KEY.sub(renamed, text[:end]) + text[end:]
