"""Selection without a federation: the clients that a selector chooses from given profiles."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from potluck.common.errors import ConfigurationError, PotluckError, RunError
from potluck.common.learning.task_failures import plugin_failure
from potluck.server.cohorts.selection_checks import check_declared, check_selection
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


@dataclass(frozen=True, kw_only=True)
class OfflineRound:
    """A round's number, from 1, and its cohort as rows of the population."""

    round: int
    selection: Selection


def select_offline(
    selector: Selector, population: Population, name: str, *, rounds: int, count: int, seed: int
) -> Iterator[OfflineRound]:
    """Yield rounds 1 to `rounds`, with every client available and every update included.

    As in a run, the selector sees only the profiles that it declares, and its selections are
    checked. Raises ConfigurationError if no client has a profile the selector needs, or if the
    selector asks clients questions; RunError, with `name`, if a selection is invalid or the
    selector's code fails.
    """
    _check_profiles(selector, population)
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
            raise ConfigurationError(_asks(selection))
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


def _asks(selecting: Interview) -> str:
    """Return the error text for a selector that can't select offline because it asks clients."""
    try:
        question = next(selecting)
    except StopIteration:  # the selector asks no question if no client trains
        return "this selector may ask clients before it chooses, which needs a federation"
    finally:
        selecting.close()
    what = f"'{question.kind}'" if isinstance(question, Ask) else "for a sum"
    return (
        f"this selector asks {len(question.rows)} clients {what} before it chooses, and "
        "profiles don't answer that: start a run with it, or choose one that selects by profile"
    )


def _check_profiles(selector: Selector, population: Population) -> None:
    missing = sorted(
        signal for signal in selector.needs_profiles if population.disclosed(signal) is None
    )
    if missing:
        raise ConfigurationError(
            f"this selector needs the {missing[0]} of clients, and no client has one; "
            f"add it, or choose another selector",
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
                f"-o {assignment!r} is not KEY=VALUE; write it like -o added=5"
            )
        if key in options:
            raise ConfigurationError(f"-o {key} is given twice; give it once", option=key)
        options[key] = _value(text)
    return options


def _value(text: str) -> Any:
    if text in ("on", "off"):
        return text == "on"
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
