"""The operator's command, `potluck`."""

from __future__ import annotations

from typing import Annotated

import typer

from potluck.common.process.command_line import run_command_line, version_option
from potluck.deploy.commands.all_commands import AllCommands

PROGRAM = "potluck"

app = typer.Typer(
    name=PROGRAM,
    cls=AllCommands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""Operate a federation: start runs, watch them, fetch their models.

To see a complete federation on this machine alone:

    potluck demo

To start one by hand, make certificates (`potluck pki`), start `potluck-server` and some
`potluck-client`, write operator.toml and a run file (`potluck config`), then:

    potluck clients
    potluck run run.toml --watch

Commands that talk to a coordinator find it by their flags, else by POTLUCK_COORDINATOR,
POTLUCK_CERTIFICATE, POTLUCK_KEY and POTLUCK_AUTHORITY, else by ./operator.toml or
~/.config/potluck/operator.toml.

Exit codes: 0 done, 1 could not be done, 2 the command line is wrong, 130 interrupted.""",
)


@app.callback()
def options(
    version: Annotated[bool, version_option(PROGRAM)] = False,
) -> None:
    """Options before the command."""
    del version


def main() -> None:
    """Entry point of the console script `potluck`."""
    run_command_line(app, program=PROGRAM)


if __name__ == "__main__":
    main()
