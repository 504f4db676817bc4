"""Checks options of a plug-in against the annotations of its constructor.

Options are values that a run file can contain: JSON values. Types are strict (no text or boolean
for a number, no 2.0 for 2), and numbers must be finite unless an annotation allows others. A
parameter without an annotation accepts any value.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NotRequired, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic_core import ErrorDetails
from typing_extensions import Format, TypedDict, get_annotations

from potluck.common.errors import PluginError
from potluck.common.settings.wanted import meant, wanted

# Parameters ---------------------------------------------------------------------------------------


def signature_of(make: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `make`, even if its annotations name undefined types.

    From Python 3.14 on, annotations are evaluated on access. They may name types that are imported
    only for type checkers.
    """
    if sys.version_info >= (3, 14):
        return inspect.signature(make, annotation_format=Format.FORWARDREF)
    return inspect.signature(make)


# Checks -------------------------------------------------------------------------------------------

_LONGEST_VALUE = 80


def checked(make: Callable[..., Any], options: Mapping[str, object], *, of: str) -> dict[str, Any]:
    """Return the options, converted to the types that the class or function `make` accepts.

    of: name of `make` in errors. Raises PluginError with one sentence for each wrong option.
    """
    try:
        return _table(make).validate_json(json.dumps(dict(options), default=str), strict=True)
    except ValidationError as error:
        problems = _problems(make, error.errors(include_url=False), options)
        raise PluginError(f"{of}: {'; '.join(problems)}") from None
    except TypeError as error:  # an annotation that pydantic can't check
        raise PluginError(
            f"{of}: the options can't be checked: {error}; correct the type annotations"
        ) from None


@functools.lru_cache(maxsize=128)
def _table(make: Callable[..., Any]) -> TypeAdapter[dict[str, Any]]:
    """Return a type adapter for the options of `make`; options without a default are required."""
    hints, options, open_ended = _hints(make), dict[str, Any](), False
    for name, parameter in signature_of(make).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            open_ended = True
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            hint = _checkable(hints.get(name, Any))
            options[name] = hint if parameter.default is parameter.empty else NotRequired[hint]
    config = ConfigDict(extra="allow" if open_ended else "forbid", allow_inf_nan=False)
    body = {
        "__annotations__": options,
        "__module__": make.__module__,
        "__pydantic_config__": config,
    }
    table: Any = types.new_class(
        "Options", (TypedDict,), exec_body=lambda space: space.update(body)
    )
    return TypeAdapter(table)


def _hints(make: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotation of each parameter, except those that can't be evaluated."""
    sources: list[tuple[Mapping[str, Any], dict[str, Any]]] = []
    if isinstance(make, type) and is_dataclass(make):
        for each in reversed(make.__mro__):
            annotated = get_annotations(each, format=Format.FORWARDREF)
            sources.append((annotated, vars(sys.modules[each.__module__])))
    else:
        function: Any = make.__init__ if isinstance(make, type) else make  # type: ignore[misc]  # a class as a value
        function = inspect.unwrap(function)
        if inspect.isfunction(function):
            annotated = get_annotations(function, format=Format.FORWARDREF)
            sources.append((annotated, function.__globals__))
    found: dict[str, Any] = {}
    for by_option, names in sources:
        for option, annotation in by_option.items():
            one = types.SimpleNamespace(__annotations__={option: annotation})
            with contextlib.suppress(Exception):
                found |= get_type_hints(one, names, include_extras=True)
    return found


def _checkable(hint: Any) -> Any:
    """Return the annotation, or Any if it names a type that JSON values can't have."""
    try:
        TypeAdapter(hint)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return Any
    return hint


def _problems(
    make: Callable[..., Any], details: Sequence[ErrorDetails], options: Mapping[str, object]
) -> list[str]:
    """Return one sentence for each wrong option. For a union, the sentence lists the requirements
    of all its members."""
    known = list(signature_of(make).parameters)
    listed = f"its options: {', '.join(known) or 'none'}"
    reasons: dict[str, list[str]] = {}
    found: list[str] = []
    for detail in details:
        if not detail["loc"]:  # a value that is nested too deep, or is not valid Unicode
            return [f"its options can't be read: {detail['msg']}"]
        option = str(detail["loc"][0])
        if detail["type"] == "extra_forbidden":
            found.append(f"there is no option '{option}'{meant(option, known)}; {listed}")
        elif detail["type"] == "missing" and len(detail["loc"]) == 1:
            found.append(f"option '{option}' is missing; {listed}")
        else:
            said = wanted(detail)
            reasons.setdefault(option, []).append(
                f"it {said}" if said.startswith("must ") else said
            )
    for option, said_of_it in reasons.items():
        shown = repr(options[option])
        value = shown if len(shown) <= _LONGEST_VALUE else shown[:_LONGEST_VALUE] + "…"
        must = ", or ".join(dict.fromkeys(said_of_it)).replace(", or it must be", " or")
        found.append(f"option '{option}' is {value}; {must}")
    return found
