"""Secure sums that a selector asks for in the course of a selection (`unsafe-stepwise`).

Lives on the event loop. Only clients whose owner allows `unsafe-stepwise` take part, and only runs
with that setting ask for them: differences of such sums reveal single clients' counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.common.disclosure import SumKind
from potluck.common.errors import RunError, StorageError
from potluck.common.learning.step_by_step import UNSAFE_STEPWISE
from potluck.server.rounds.plan import RunPlan
from potluck.server.selection import AskSum, Summed
from potluck.server.store.records import AttemptKey, JsonObject
from potluck.server.sums.counts import SecureSums
from potluck.server.sums.label_sums import Say, sum_terms


async def sum_at_step(
    run_id: str,
    plan: RunPlan,
    sums: SecureSums,
    clients: Sequence[str],
    present: Callable[[str], bool],
    say: Say,
) -> tuple[Sequence[str], NDArray[np.int64]] | None:
    """The clients whose counts are in the sum over these clients, and the sum; None, with a notice,
    without one.

    Raises RunError in a run that has another mode.
    """
    mode = plan.run_file.profiles.disclosure
    if mode != UNSAFE_STEPWISE:
        raise RunError(
            f"selector '{plan.run_file.selector.name}' asks for sums at every step, and "
            f"this run's profiles.disclosure is '{mode}', not '{UNSAFE_STEPWISE}'"
        )
    try:
        terms = sum_terms(run_id, plan, SumKind.STEPWISE)
        outcome = await sums.sum_counts(terms, clients, present=present)
    except RunError as error:
        say(f"no sum over {len(clients)} selected clients: {error.message}", warning=True)
        return None
    if outcome.total is None:
        say(f"no sum over {len(clients)} selected clients: {outcome.explain()}", warning=True)
        return None
    return sorted(outcome.record.clients), outcome.total


# What is stored ---------------------------------------------------------------------------------


def question_record(ask: AskSum) -> JsonObject:
    """A question for a sum."""
    return {"kind": SumKind.STEPWISE.value, "sum": ask.rows.tolist()}


def is_sum(question: JsonObject) -> bool:
    """Return whether a stored question asks for a sum."""
    return "sum" in question


def sum_record(summed: Summed | None) -> JsonObject:
    """A sum as it is stored."""
    if summed is None:
        return {"rows": [], "total": None}
    return {"rows": summed.rows.tolist(), "total": summed.total.tolist()}


def stored_sum(record: JsonObject, key: AttemptKey) -> Summed | None:
    """A sum as it was stored. Raises StorageError if it has been tampered with."""
    try:
        if record["total"] is None:
            return None
        rows = np.array(record["rows"], dtype=np.int64)
        total = np.array(record["total"], dtype=np.int64)
        if rows.ndim == 1 and total.ndim == 1:
            return Summed(rows=rows, total=total)
        why = "not lists of numbers"
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        why = repr(error)
    raise StorageError(f"the stored sum of {key} can't be read: {why}; restore the database")
