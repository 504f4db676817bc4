"""Old names of command-line options: accepted until 0.2, with a warning that gives the new name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from typer.core import TyperCommand

from potluck.common.settings.old_spelling import warn_of_old_spelling

OLD_OPTIONS: Final = {"--count": "--clients-per-round"}
"""The new name of each option that was renamed before 0.1."""


class CommandWithOldOptions(TyperCommand):
    """A command that also accepts the old names of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with old names of options replaced."""
        return super().parse_args(ctx, current_options(args))


def current_options(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments with old option names replaced; warn about each old name."""
    found: list[str] = []
    for argument in arguments:
        name, sign, value = argument.partition("=")
        if name in OLD_OPTIONS:
            warn_of_old_spelling(name, OLD_OPTIONS[name], what="option")
        found.append(OLD_OPTIONS.get(name, name) + sign + value)
    return found
