"""Consoles for output of commands that people read."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def terminal(
    *, stderr: bool = False, quiet: bool = False, width: int | None = None, soft_wrap: bool = False
) -> Console:
    """Return a console that never interprets text as markup.

    Names and reasons come from other machines, so they may contain markup.
    """
    return Console(
        stderr=stderr, quiet=quiet, width=width, soft_wrap=soft_wrap, markup=False, emoji=False
    )


def table_console() -> Console:
    """Return a console for tables that also suits piped output."""
    console = terminal()
    # rich assumes that a pipe has 80 columns, and would cut the table there.
    return console if console.is_terminal else terminal(width=240)


def print_next(console: Console, *commands: str) -> None:
    """Print the commands that a user can run next."""
    console.print("Next:")
    for command in commands:
        print_line(console, f"  {command}", style="cyan")


def print_line(console: Console, line: str, style: str = "") -> None:
    """Print a line with paths or commands to copy: never wrapped, never interpreted as markup."""
    console.print(Text(line, style=style), soft_wrap=True)
