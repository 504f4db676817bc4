"""Words of error messages: requirements on values, without type names of Python or pydantic, and
suggestions for misspelt names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

from pydantic_core import ErrorDetails

# Requirements -------------------------------------------------------------------------------------

_TABLE: Final = "must be a table"
_TRUTH: Final = "must be true or false"
_NUMBER: Final = "must be a number"
_WHOLE: Final = "must be a whole number"
_LIST: Final = "must be a list"
_WANTED: Final = {
    "bool_parsing": _TRUTH,
    "bool_type": _TRUTH,
    "dict_type": _TABLE,
    "extra_forbidden": "is not known here",
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "int_from_float": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": "must be a smaller number",
    "int_type": _WHOLE,
    "list_type": _LIST,
    "mapping_type": _TABLE,
    "missing": "is missing",
    "model_attributes_type": _TABLE,
    "model_type": _TABLE,
    "path_type": "must be a path",
    "string_type": "must be a text",
    "tuple_type": _LIST,
}
"""Requirement for each of pydantic's error types; other types use pydantic's message."""


def wanted(detail: ErrorDetails) -> str:
    """Return what pydantic requires in place of the given value, such as "must be a whole number".

    If a custom validator refused the value, return the message of this validator.
    """
    if detail["type"] in _WANTED:
        return _WANTED[detail["type"]]
    bounds = detail.get("ctx", {})
    least = bounds.get("min_length")
    if detail["type"] == "string_too_short" and least == 1:
        return "must not be empty"
    if detail["type"] == "string_too_long":
        return f"must have {bounds.get('max_length')} characters at most"
    if detail["type"] == "too_short":
        return f"must have {_entries(least)} at least"
    if detail["type"] == "too_long":
        return f"must have {_entries(bounds.get('max_length'))} at most"
    said = detail["msg"].removeprefix("Value error, ")
    return re.sub(r"^(Input|String|List|Tuple|Dictionary) should ", "must ", said)


def any_of(reasons: Iterable[str]) -> str:
    """Join requirements, of which a value must meet at least one, into one sentence."""
    first, *others = dict.fromkeys(reasons)
    return " or ".join([first, *(each.removeprefix("must be ") for each in others)])


def _entries(count: object) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


# Suggestions --------------------------------------------------------------------------------------


def meant(name: str, choices: Iterable[str], *, likeness: float = 0.6) -> str:
    """Return the text " (did you mean '…'?)" with the most similar choice; empty if none is
    similar.

    likeness: minimum similarity by difflib, from 0 to 1 (equal).
    """
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=likeness)
    return f" (did you mean '{close[0]}'?)" if close else ""
