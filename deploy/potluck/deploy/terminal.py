"""Consoles on which commands write for people."""

from __future__ import annotations

from rich.console import Console


def terminal(
    *, stderr: bool = False, quiet: bool = False, width: int | None = None, soft_wrap: bool = False
) -> Console:
    """A console that takes text as it is: names and reasons come from others, so that nothing in
    them may be read as markup."""
    return Console(
        stderr=stderr, quiet=quiet, width=width, soft_wrap=soft_wrap, markup=False, emoji=False
    )
