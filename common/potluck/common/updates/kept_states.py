"""What clients keep of their trainings, by purpose. It never leaves a client."""

from __future__ import annotations

from typing import Final

CORRECTION: Final = "correction"
"""What a strategy's correction keeps, such as SCAFFOLD's control variates."""
PURPOSES: Final = frozenset({CORRECTION})
"""All that a host of this release can keep."""
