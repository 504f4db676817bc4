"""Groups of commands in `potluck --help`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

OTHERS: Final = "From other packages"
"""Title of the group of all commands that no group names."""

GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "Run": ("demo", "config", "run", "watch", "stop", "resume", "delete"),
    "Look": ("runs", "model", "evaluate", "export", "report", "page"),
    "Federation": ("doctor", "clients", "pki", "deploy"),
    "Privacy": ("privacy", "profiles", "audit", "audit-labels", "audit-selection"),
    "Research": ("select", "experiment", "preset", "data", "pretrained"),
}
"""Names of commands by title of group, in the order of the help."""


def group_of(command: str) -> str:
    """Return the title of a command's group."""
    return next((title for title, names in GROUPS.items() if command in names), OTHERS)


def in_order(commands: Sequence[str]) -> list[str]:
    """Return names of commands in the order of the help; those of other packages come last."""
    listed = [name for names in GROUPS.values() for name in names]
    return [name for name in listed if name in commands] + [
        name for name in commands if name not in listed
    ]
