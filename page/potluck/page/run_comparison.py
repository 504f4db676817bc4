"""Comparison of several runs for the web UI. Pure."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from potluck.common.run_file.runfile import OLD_KEYS
from potluck.page.page_shapes import ComparisonShown, Difference, RunShown

MOST_RUNS = 6
"""Maximum number of runs compared at once; more colours can't be distinguished."""
_ABSENT = "–"
_NO_SETTING = frozenset({"name"})


def compared(runs: Sequence[RunShown], run_files: Sequence[str]) -> ComparisonShown:
    """Return the runs, and the settings in which their run files differ, in the files' order."""
    tables = [tomllib.loads(text) for text in run_files]
    current = [{OLD_KEYS.get(key, key): each[key] for key in each} for each in tables]
    settings = [dict(_settings(table)) for table in current]
    keys = dict.fromkeys(key for each in settings for key in each if key not in _NO_SETTING)
    found = {key: [each.get(key, _ABSENT) for each in settings] for key in keys}
    return ComparisonShown(
        runs=list(runs),
        differences=[
            Difference(key=key, values=values)
            for key, values in found.items()
            if len(set(values)) > 1
        ],
    )


def _settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a TOML table as text, by dotted key."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text
