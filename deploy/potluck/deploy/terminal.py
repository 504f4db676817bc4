"""Consoles on which commands write for people."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def terminal(
    *, stderr: bool = False, quiet: bool = False, width: int | None = None, soft_wrap: bool = False
) -> Console:
    """A console that takes text as it is: names and reasons come from others, so that nothing in
    them may be read as markup."""
    return Console(
        stderr=stderr, quiet=quiet, width=width, soft_wrap=soft_wrap, markup=False, emoji=False
    )


def print_next(console: Console, *commands: str) -> None:
    """Print the commands to go on with."""
    console.print("Next:")
    for command in commands:
        print_line(console, f"  {command}", style="cyan")


def print_line(console: Console, line: str, style: str = "") -> None:
    """Print a line with paths or commands for copying: never wrapped, never read as markup."""
    console.print(Text(line, style=style), soft_wrap=True)
