"""Seeds as a person lists them: numbers and ranges of them."""

from __future__ import annotations

import re

from potluck.common.errors import ConfigurationError

MOST_SEEDS = 10_000
"""A longer list is a slip, such as a date."""

_PART = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)


def seeds_in(text: str) -> tuple[int, ...]:
    """The seeds of a text such as `0-9` or `0,3,5-7`, in its order; ends of ranges count.

    Raises ConfigurationError for anything else, a seed that comes twice, a range that runs
    backwards, or more than MOST_SEEDS.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise _refused("takes numbers and ranges, such as 0-9 or 0,3,5-7", text)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _refused(f"has the range {first}-{last}, which runs backwards", text)
        if last - first + len(found) >= MOST_SEEDS:
            raise _refused(f"takes {MOST_SEEDS} seeds at most", text)
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise _refused("has a seed twice", text)
    return tuple(found)


def _refused(why: str, text: str) -> ConfigurationError:
    return ConfigurationError(f"--seeds {why}; got '{text}'", seeds=text)
