"""Converts a committed round to one row of a table. `potluck export` and sinks use the same row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from potluck.common.records.privacy_loss import RoundPrivacy
from potluck.common.records.round import Round

Cell: TypeAlias = float | int | str
TableRow: TypeAlias = dict[str, Cell]

ROUND = "round"
"""The column with a round's number."""
SECONDS = "seconds"
"""Name of a column that every round has."""


def round_row(record: Round) -> TableRow:
    """Return the row of a round, with one column per measure.

    The columns about the clients behind a measure are omitted if the coordinator measured it on its
    own data.
    """
    behind: TableRow = {}
    for name, each in sorted(record.column_coverage.items()):
        if each.asked:
            behind |= {f"{name}_clients": each.clients, f"{name}_asked": each.asked}
            behind[f"{name}_partial"] = int(each.partial)
        behind[f"{name}_samples"] = each.samples
    return {
        ROUND: record.number,
        **dict(sorted(record.measures.items())),
        **{f"{name}_worst_tenth": value for name, value in sorted(record.worst_tenths.items())},
        "selected": len(record.members),
        "included": len(record.included),
        SECONDS: record.seconds,
        "bytes_down": record.bytes_down,
        "bytes_up": record.bytes_up,
        "model": record.model,
        **behind,
        **({} if record.privacy is None else _privacy(record.privacy)),
    }


def _privacy(found: RoundPrivacy) -> TableRow:
    """Return the columns about the privacy loss of a run with `[privacy]`, without values that are
    unknown."""
    values = {
        "privacy_epsilon": found.largest,
        "privacy_median_epsilon": found.median,
        "privacy_near_limit": found.near_limit,
        "privacy_refused": found.refused,
    }
    return {name: value for name, value in values.items() if value is not None}


def columns_of(rows: Iterable[Mapping[str, object]], known: Iterable[str] = ()) -> list[str]:
    """Return all columns of some rows: first `known`, then others in order of appearance."""
    names = dict.fromkeys(known)
    for row in rows:
        names.update(dict.fromkeys(row))
    return list(names)
