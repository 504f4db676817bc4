"""A committed round as one row of a table, the same for `potluck export` and for sinks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from potluck.common.learning.coverage import Coverage

Cell: TypeAlias = float | int | str
TableRow: TypeAlias = dict[str, Cell]

ROUND = "round"
"""The column with a round's number."""
SECONDS = "seconds"
"""A column that every round has."""


def round_row(
    number: int,
    measures: Mapping[str, float],
    worst_tenths: Mapping[str, float],
    *,
    selected: int,
    included: int,
    seconds: float,
    bytes_down: int,
    bytes_up: int,
    model: str,
    coverage: Mapping[str, Coverage] = MappingProxyType({}),
) -> TableRow:
    """The row of a round; measures stand in it by name.

    number: from 1. measures: of its model, by name. worst_tenths: of measures over clients, the
    mean of the tenth for which it is worst. selected, included: clients. seconds: from selection to
    commit. model: its BLAKE3 digest. coverage: clients and samples behind measures, by column; the
    clients are left out where the coordinator measured its own data.
    """
    behind: TableRow = {}
    for name, each in sorted(coverage.items()):
        if each.asked:
            behind |= {f"{name}_clients": each.clients, f"{name}_asked": each.asked}
            behind[f"{name}_partial"] = int(each.partial)
        behind[f"{name}_samples"] = each.samples
    return {
        ROUND: number,
        **dict(sorted(measures.items())),
        **{f"{name}_worst_tenth": value for name, value in sorted(worst_tenths.items())},
        "selected": selected,
        "included": included,
        SECONDS: seconds,
        "bytes_down": bytes_down,
        "bytes_up": bytes_up,
        "model": model,
        **behind,
    }


def columns_of(rows: Iterable[Mapping[str, object]], known: Iterable[str] = ()) -> list[str]:
    """The columns of some rows, in the order in which they first appear, after those known."""
    names = dict.fromkeys(known)
    for row in rows:
        names.update(dict.fromkeys(row))
    return list(names)
