"""A selector's memory: numbers from each client's last update, and its number of picks.

State: `picks`, K; `seen`, the rows with a known update, sorted; `known`, one row of float32 for
each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError
from potluck.server.selection import Floats, RoundOutcome, Rows, SelectionContext
from potluck.server.selectors.parts.choosing import Cohort

LIMIT: Final = 3_000
"""Maximum number of clients that are compared pairwise; comparing them takes a few seconds."""

Arrays = Mapping[str, NDArray[Any]]


def check_size(name: str, context: SelectionContext, limit: int = LIMIT) -> None:
    """Raise ConfigurationError if a run has too many clients to compare them pairwise."""
    clients = len(context.population)
    if clients > limit:
        raise ConfigurationError(
            f"selector {name} compares all clients with one another and supports up to "
            f"{limit:,} clients, but the run has {clients:,}; choose another selector or option, "
            "or fewer clients",
            selector=name,
            clients=clients,
        )


def nothing(clients: int, numbers: int = 0) -> dict[str, NDArray[Any]]:
    """Return the state before round 1, without known updates. numbers: number of entries in a
    client's row."""
    return {
        "picks": np.zeros(clients, dtype=np.int64),
        "seen": np.zeros(0, dtype=np.int64),
        "known": np.zeros((0, numbers), dtype=np.float32),
    }


def remembered(arrays: Arrays, outcome: RoundOutcome, found: Floats) -> dict[str, NDArray[Any]]:
    """Return the state after a round. found: one row of numbers to remember for each update in the
    round's facts."""
    picks = arrays["picks"]
    more = max(0, int(outcome.cohort.max(initial=-1)) + 1 - len(picks))
    picks = np.append(picks, np.zeros(more, dtype=np.int64))
    picks[outcome.cohort] += 1
    seen, known = arrays["seen"], arrays["known"]
    if outcome.facts is not None and len(found):
        rows = outcome.facts.rows
        with np.errstate(over="ignore"):
            newest = np.nan_to_num(found.astype(np.float32))
        if known.shape[1] != newest.shape[1]:  # no update was known before
            known = np.zeros((0, newest.shape[1]), dtype=np.float32)
        kept = ~np.isin(seen, rows)
        seen, known = np.append(seen[kept], rows), np.concatenate([known[kept], newest])
        order = np.argsort(seen)
        seen, known = seen[order], known[order]
    return {"picks": picks, "seen": seen, "known": known}


def of_rows(arrays: Arrays, rows: Rows) -> tuple[NDArray[np.bool_], Floats]:
    """Return which of these rows are known, and the numbers of the known rows."""
    seen = arrays["seen"]
    known = np.isin(rows, seen)
    return known, arrays["known"][np.searchsorted(seen, rows[known])].astype(np.float64)


def sweep(cohort: Cohort, arrays: Arrays, context: SelectionContext) -> None:
    """Add never-picked clients, drawn uniformly, until the cohort is full or there are none
    left."""
    picks = arrays["picks"]
    fresh = context.available >= len(picks)
    fresh[~fresh] = picks[context.available[~fresh]] == 0
    cohort.draw(cohort.missing, "never picked before", context.available[fresh])


def angles(vectors: Floats) -> Floats:
    """Return the angles between all pairs of rows, n × n, in radians. The angle to a row of zeros
    (unknown) is 0."""
    largest = np.abs(vectors).max(axis=1, initial=0.0, keepdims=True)
    scaled = vectors / np.where(largest > 0, largest, 1.0)
    lengths = np.linalg.norm(scaled, axis=1)
    unit = scaled / np.where(lengths > 0, lengths, 1.0)[:, None]
    found = np.arccos((unit @ unit.T).clip(-1.0, 1.0))
    found[lengths == 0] = 0.0
    found[:, lengths == 0] = 0.0
    np.fill_diagonal(found, 0.0)
    result: Floats = (found + found.T) / 2
    return result


def ward(distances: Floats) -> Floats:
    """Return the merges of Ward's clustering, in SciPy's format. distances: n × n, n ≥ 2."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    merges: Floats = linkage(squareform(distances, checks=False), "ward")
    return merges
