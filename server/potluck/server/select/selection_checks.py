"""Checks of a selector's selections and questions."""

from __future__ import annotations

import math

import numpy as np

from potluck.common.errors import RunError
from potluck.common.names import is_name
from potluck.server.selection import Ask, AskSum, Selection, SelectionContext, Selector

MOST_NAMES = 1024
"""Maximum number of values that a selector may request in one question."""

MOST_EPOCHS = 10**6
"""Maximum number of passes of one client in a round."""


def check_selection(selection: Selection, context: SelectionContext, name: str) -> None:
    """Raise RunError, naming the selector, unless it chose available clients, each at most once."""
    rows = [int(row) for row in selection.rows]
    if not rows:
        raise RunError(
            f"selector '{name}' chose an empty cohort in round {context.round}; it must choose at "
            "least one client",
            selector=name,
        )
    if len(set(rows)) != len(rows):
        raise RunError(f"selector '{name}' chose a client twice", selector=name)
    strangers = sorted(set(rows) - set(context.available.tolist()))
    if strangers:
        raise RunError(
            f"selector '{name}' chose row {strangers[0]}, whose client is not available",
            selector=name,
        )
    if len(rows) > context.count:
        raise RunError(
            f"selector '{name}' chose {len(rows)} clients, but the run requests {context.count}",
            selector=name,
        )
    if len(selection.reasons) != len(rows):
        raise RunError(
            f"selector '{name}' must return one reason for each chosen client", selector=name
        )
    _check_quotas(selection, context, name)
    _check_weights(selection, name)
    _check_epochs(selection, name)
    _check_dropped(selection, context, name)


def _check_quotas(selection: Selection, context: SelectionContext, name: str) -> None:
    quotas, wanted = selection.quotas, (len(selection.rows), context.population.classes)
    if quotas is None:
        return
    if not isinstance(quotas, np.ndarray) or quotas.shape != wanted or not (quotas >= 0).all():
        raise RunError(
            f"selector '{name}' must return quotas ≥ 0 (or infinite) as an array of {wanted[0]} "
            f"clients × {wanted[1]} classes",
            selector=name,
        )


def check_declared(selector: Selector, selection: Selection, name: str) -> None:
    """Raise RunError if a selection uses a feature that its selector has not declared."""
    undeclared = {
        "limits clients' samples without declaring `sets_quotas`": (
            selection.quotas is not None and not selector.sets_quotas
        ),
        "sets updates' weights without declaring `sets_weights`": (
            selection.weights is not None and not selector.sets_weights
        ),
        "sets numbers of passes without declaring `sets_epochs`": (
            selection.epochs is not None and not selector.sets_epochs
        ),
        "makes clients omit tensors without declaring `drops_tensors`": (
            selection.dropped is not None and not selector.drops_tensors
        ),
    }
    for what, found in undeclared.items():
        if found:
            raise RunError(
                f"selector '{name}' {what}; set this attribute of the selector to True",
                selector=name,
            )


def _check_weights(selection: Selection, name: str) -> None:
    weights, wanted = selection.weights, (len(selection.rows),)
    if weights is None:
        return
    sound = isinstance(weights, np.ndarray) and weights.shape == wanted
    if not sound or not ((weights > 0) & np.isfinite(weights)).all():
        raise RunError(
            f"selector '{name}' must return a finite weight above 0 for each chosen client",
            selector=name,
        )


def _check_epochs(selection: Selection, name: str) -> None:
    epochs, wanted = selection.epochs, (len(selection.rows),)
    if epochs is None:
        return
    sound = isinstance(epochs, np.ndarray) and epochs.shape == wanted and epochs.dtype.kind == "i"
    if not sound or not ((epochs >= 1) & (epochs <= MOST_EPOCHS)).all():
        raise RunError(
            f"selector '{name}' must return a whole number of epochs from 1 to {MOST_EPOCHS} for "
            "each chosen client",
            selector=name,
        )


def _check_dropped(selection: Selection, context: SelectionContext, name: str) -> None:
    dropped = selection.dropped
    if dropped is None:
        return
    known = set(context.tensors)
    if len(dropped) != len(selection.rows) or not all(
        set(names) < known for names in dropped if names
    ):
        raise RunError(
            f"selector '{name}' must return, for each chosen client, the tensors to omit from its "
            f"update: none or some of the {len(known)} parameters, but not all",
            selector=name,
        )


def check_ask(ask: object, context: SelectionContext, name: str) -> None:
    """Raise RunError, naming the selector, unless its question is valid and asks available
    clients."""
    if not isinstance(ask, Ask | AskSum):
        raise RunError(
            f"selector '{name}' yielded a {type(ask).__name__}; it must yield Ask", selector=name
        )
    rows = ask.rows
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise RunError(
            f"selector '{name}' asks rows that are not a one-dimensional array of integers; set "
            "`rows` to such an array",
            selector=name,
        )
    if not len(rows):
        raise RunError(
            f"selector '{name}' asks an empty set of clients in round {context.round}; it must ask "
            "at least one, or choose without asking",
            selector=name,
        )
    if len(np.unique(rows)) != len(rows):
        raise RunError(f"selector '{name}' asks a client twice in one question", selector=name)
    strangers = np.setdiff1d(rows, context.available)
    if len(strangers):
        raise RunError(
            f"selector '{name}' asks row {strangers[0]}, whose client is not available",
            selector=name,
        )
    if isinstance(ask, Ask):
        _check_wanted(ask, name)


def _check_wanted(ask: Ask, name: str) -> None:
    wanted = ask.wanted
    if not all(isinstance(each, str) and is_name(each) for each in (ask.kind, *wanted)):
        raise RunError(
            f"selector '{name}' asks for {', '.join(map(repr, (ask.kind, *wanted)))}; kinds and "
            "names must be words in lower case",
            selector=name,
        )
    if len(set(wanted)) != len(wanted) or len(wanted) > MOST_NAMES:
        raise RunError(
            f"selector '{name}' asks for {len(wanted)} numbers at once; ask for at most "
            f"{MOST_NAMES} different names",
            selector=name,
        )
    for key, value in ask.parameters.items():
        if not isinstance(value, bool | int | float | str) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            raise RunError(
                f"selector '{name}' asks '{ask.kind}' with {key} = {value!r}; parameters must be "
                "finite numbers, booleans or text",
                selector=name,
            )
