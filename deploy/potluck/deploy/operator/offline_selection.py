"""Selection without a federation: the clients that a selector chooses from given profiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from potluck.common.errors import ConfigurationError, PotluckError, RunError
from potluck.common.learning.task_failures import plugin_failure
from potluck.common.settings.configuration import parse_toml
from potluck.common.settings.wanted import wanted
from potluck.server.select.selection_checks import check_declared, check_selection
from potluck.server.selection import (
    Ask,
    Interview,
    Population,
    RoundOutcome,
    Selection,
    SelectionContext,
    Selector,
    by_field,
)

# Files of profiles --------------------------------------------------------------------------------
#     {"classes": 3, "clients": [
#       {"id": "a", "samples": 40, "label_counts": [10, 0, 30], "triplet": [0.3, 0.1, 0.5],
#        "interaction_matrix": [[5, 5], [0, 0], [20, 10]]}]}
#
# A client needs only an `id`. `classes` may be omitted if a client has label counts.

Floats = NDArray[np.float64]

_Count = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
_STRICT = ConfigDict(extra="forbid")


@with_config(_STRICT)
class _Client(TypedDict):
    id: Annotated[str, Field(min_length=1)]
    samples: NotRequired[Annotated[int, Field(ge=0, lt=2**63, strict=True)]]
    label_counts: NotRequired[list[_Count]]
    triplet: NotRequired[tuple[_Share, _Share, _Share]]
    interaction_matrix: NotRequired[list[tuple[_Count, _Count]]]


@with_config(_STRICT)
class _File(TypedDict):
    classes: NotRequired[Annotated[int, Field(ge=1, strict=True)]]
    clients: Annotated[list[_Client], Field(min_length=1)]


_ADAPTER = TypeAdapter(_File)


def read_profile_file(path: Path) -> Population:
    """Return the clients of a profile file, in the file's order.

    A column is None if no client has that field. Raises ConfigurationError, with the names of the
    file, the client and the field, if a value is invalid.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"can't read {path}: {error.strerror}", path=path) from error
    try:
        file = _ADAPTER.validate_json(content)
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {_first_fault(error)}", path=path) from None
    clients = file["clients"]
    ids = [client["id"] for client in clients]
    if len(set(ids)) < len(ids):
        repeated = Counter(ids).most_common(1)[0][0]
        raise ConfigurationError(
            f"{path}: client '{repeated}' occurs twice; give every client its own id",
            path=path,
        )
    classes = file.get("classes") or _classes_shown(clients)
    column = _columns(path, clients, classes)
    return Population(
        ids=ids,
        classes=classes,
        samples=np.array([client.get("samples", 0) for client in clients], dtype=np.int64),
        label_counts=column("label_counts", (classes,)),
        triplets=column("triplet", (3,)),
        interaction_matrices=column("interaction_matrix", (classes, 2)),
    )


def _classes_shown(clients: Sequence[_Client]) -> int:
    for client in clients:
        counts = client.get("label_counts") or client.get("interaction_matrix")
        if counts:
            return len(counts)
    return 1


_Field = Literal["label_counts", "triplet", "interaction_matrix"]


def _columns(
    path: Path, clients: Sequence[_Client], classes: int
) -> Callable[[_Field, tuple[int, ...]], Floats | None]:
    def column(name: _Field, shape: tuple[int, ...]) -> Floats | None:
        values = [client.get(name) for client in clients]
        holders = [row for row, value in enumerate(values) if value is not None]
        for row in holders:
            length = len(values[row] or ())
            if length != shape[0]:
                raise ConfigurationError(
                    f"{path}: field {name} of client '{clients[row]['id']}' has {length} entries "
                    f"for {classes} classes; give one entry per class",
                    path=path,
                )
        if not holders:
            return None
        if len(holders) == len(clients):
            return np.array(values, dtype=np.float64)
        result = np.full((len(clients), *shape), np.nan)
        result[holders] = [values[row] for row in holders]
        return result

    return column


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in fault["loc"])
    reason = wanted(fault)
    reason = reason[:1].lower() + reason[1:]
    given = fault["input"]
    shown = (
        f", not {given!r}" if isinstance(given, int | float | str) and len(str(given)) < 40 else ""
    )
    return f"{place}: {reason}{shown}" if place else f"{reason}"


# The selection ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OfflineRound:
    """A round's number, from 1, and its cohort as rows of the population."""

    round: int
    selection: Selection


def select_offline(
    selector: Selector, population: Population, name: str, *, rounds: int, count: int, seed: int
) -> Iterator[OfflineRound]:
    """Yield rounds 1 to `rounds`, as if every client were available and every update included.

    As in a run, the selector sees only the profiles that it declares, and its selections are
    checked. Raises ConfigurationError if no client has a profile the selector needs, or if the
    selector asks clients questions; RunError, with `name`, if a selection is invalid or the
    selector's code fails.
    """
    _check_profiles(selector, population, name)
    try:
        yield from _rounds(selector, _declared(selector, population), name, rounds, count, seed)
    except PotluckError:
        raise
    except Exception as error:
        failure = plugin_failure(error, {f"selector '{name}'": selector})
        if not failure:
            raise
        raise RunError(failure, selector=name) from error


def _declared(selector: Selector, population: Population) -> Population:
    """Return the population without the profiles that the selector does not declare."""
    columns = {
        signal: column
        for signal in selector.needs_profiles
        if (column := population.disclosed(signal)) is not None
    }
    totals = population.label_totals if selector.wants_label_totals else None
    hidden = replace(
        population, label_counts=None, triplets=None, interaction_matrices=None, signals={}
    )
    return replace(hidden, label_totals=totals, **by_field(columns))


def _rounds(
    selector: Selector, population: Population, name: str, rounds: int, count: int, seed: int
) -> Iterator[OfflineRound]:
    state = selector.init(population)
    everybody = np.arange(len(population))
    for number in range(1, rounds + 1):
        context = SelectionContext(
            round=number,
            seed=seed,
            count=max(count, len(everybody)) if selector.everybody(number) else count,
            population=population,
            available=everybody,
            rounds=rounds,
        )
        selection = selector.select(state, context)
        if not isinstance(selection, Selection):
            raise ConfigurationError(_asks(selection, name), selector=name)
        check_selection(selection, context, name)
        check_declared(selector, selection, name)
        yield OfflineRound(round=number, selection=selection)
        outcome = RoundOutcome(
            round=number,
            selected=selection.rows,
            included=selection.rows,
            seconds=np.full(len(selection.rows), np.nan),
        )
        state = selector.observe(state, outcome)


def _asks(selecting: Interview, name: str) -> str:
    """Return the error text for a selector that can't select offline because it asks clients."""
    try:
        question = next(selecting)
    except StopIteration:  # the selector asks no question if no client trains
        return (
            f"selector {name} may ask clients before it chooses, which needs a federation: start a "
            "run with it, or choose one that selects by profile"
        )
    finally:
        selecting.close()
    what = f"'{question.kind}'" if isinstance(question, Ask) else "for a secure sum"
    return (
        f"selector {name} asks {len(question.rows)} clients {what} before it chooses, and "
        "profiles don't answer that: start a run with it, or choose one that selects by profile"
    )


def _check_profiles(selector: Selector, population: Population, name: str) -> None:
    missing = sorted(
        signal for signal in selector.needs_profiles if population.disclosed(signal) is None
    )
    if missing:
        raise ConfigurationError(
            f"selector {name} needs the {missing[0]} of clients, and no client has one; "
            "add it, or choose another selector",
            selector=name,
            signal=missing[0],
        )


def parse_options(assignments: Sequence[str]) -> dict[str, Any]:
    """Return options from `key=value` texts; a value is TOML (`5`, `0.1`, `true`), or plain text.

    `on` and `off` mean true and false. Raises ConfigurationError for any other form, or for a
    repeated key.
    """
    options: dict[str, Any] = {}
    for assignment in assignments:
        key, sign, text = (part.strip() for part in assignment.partition("="))
        if not sign or not key.isidentifier():
            raise ConfigurationError(
                f"-o {assignment!r} is not KEY=VALUE; write, for example, -o added=5"
            )
        if key in options:
            raise ConfigurationError(f"-o {key} is given more than once; give it once", option=key)
        options[key] = _value(text)
    return options


def _value(text: str) -> Any:
    if text in ("on", "off"):
        return text == "on"
    try:
        return parse_toml(f"value = {text}", source="-o")["value"]
    except ConfigurationError:
        return text
