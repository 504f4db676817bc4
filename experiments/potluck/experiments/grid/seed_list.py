"""Parses a list of seeds: numbers and ranges."""

from __future__ import annotations

import re

from potluck.common.errors import ConfigurationError

MOST_SEEDS = 10_000
"""Maximum number of seeds; a longer list is taken for a typing error, such as a date."""

_PART = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)


def seeds_in(text: str) -> tuple[int, ...]:
    """Return the seeds of a text such as `0-9` or `0,3,5-7`, in order; ranges include both ends.

    Raises ConfigurationError for any other text, a repeated seed, a descending range, or more than
    MOST_SEEDS seeds.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise _refused("must be numbers and ranges, such as 0-9 or 0,3,5-7", text)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _refused(f"has the range {first}-{last}, which is descending", text)
        if last - first + len(found) >= MOST_SEEDS:
            raise _refused(f"must have at most {MOST_SEEDS} seeds", text)
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise _refused("has a seed twice", text)
    return tuple(found)


def _refused(why: str, text: str) -> ConfigurationError:
    return ConfigurationError(f"--seeds {why}; got '{text}'", seeds=text)
