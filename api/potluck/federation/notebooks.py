"""Whether this is a notebook, and what renews itself in one.

A notebook has loaded IPython, so Potluck need not depend on it.
"""

from __future__ import annotations

import sys
from typing import Any


def in_notebook() -> bool:
    """True in a kernel of IPython; False in its shell on a terminal, and in plain Python."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def shown(value: object) -> Any:
    """Display something in the cell that runs; its `update` replaces it there."""
    return sys.modules["IPython"].display.display(value, display_id=True)
