"""Detection of a notebook, and displays that update themselves in one.

A notebook has already loaded IPython, so Potluck need not depend on it.
"""

from __future__ import annotations

import sys
from typing import Any


def in_notebook() -> bool:
    """Return True in an IPython kernel; False in IPython on a terminal and in plain Python."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def shown(value: object) -> Any:
    """Display a value in the running cell.

    The returned handle's `update` replaces the displayed value.
    """
    return sys.modules["IPython"].display.display(value, display_id=True)
