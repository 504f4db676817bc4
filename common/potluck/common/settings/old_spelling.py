"""Words of a setting that were replaced, and are accepted for a while with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from pydantic import BeforeValidator, ValidationInfo

ACCEPTED_UNTIL = "0.2"
"""The first version that refuses what was replaced before 0.1."""


class OldSpellingWarning(FutureWarning):
    """A setting has a value whose word was replaced."""


def old_spellings(replaced: Mapping[str, str]) -> BeforeValidator:
    """Return a validator for `Annotated` that takes each old word for its new one, with a
    warning."""

    def current(value: object, info: ValidationInfo) -> object:
        new = replaced.get(value) if isinstance(value, str) else None
        if new is None:
            return value
        warnings.warn(
            f'{info.field_name} = "{value}" is written {info.field_name} = "{new}" now; the old '
            f"word is accepted until {ACCEPTED_UNTIL}",
            OldSpellingWarning,
            stacklevel=2,
        )
        return new

    return BeforeValidator(current)
