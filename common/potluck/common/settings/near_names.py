"""Suggests names for misspelt ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(name: str, choices: Iterable[str], *, likeness: float = 0.6) -> str:
    """Return the text " (did you mean '…'?)" with the most similar choice; empty if none is
    similar.

    likeness: minimum similarity by difflib, from 0 to 1 (equal).
    """
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=likeness)
    return f" (did you mean '{close[0]}'?)" if close else ""
