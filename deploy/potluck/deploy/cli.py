"""The operator's command, `potluck`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from potluck.common.process.command_line import run_command_line, version_option
from potluck.common.run_file.runfile import example_run_file
from potluck.deploy.commands.client_commands import app as clients_app
from potluck.deploy.commands.demo_command import demo
from potluck.deploy.commands.disclosure_audit_command import COMMANDS as DISCLOSURE_AUDIT_COMMANDS
from potluck.deploy.commands.doctor_command import doctor
from potluck.deploy.commands.installed_commands import InstalledCommands
from potluck.deploy.commands.label_audit_command import COMMANDS as AUDIT_COMMANDS
from potluck.deploy.commands.old_options import CommandWithOldOptions
from potluck.deploy.commands.pki_commands import app as pki_app
from potluck.deploy.commands.profile_commands import COMMANDS as PROFILE_COMMANDS
from potluck.deploy.commands.report_command import COMMANDS as REPORT_COMMANDS
from potluck.deploy.commands.run_commands import COMMANDS
from potluck.deploy.commands.select_command import select
from potluck.deploy.operator.operator_config import example_operator_config

PROGRAM = "potluck"

app = typer.Typer(
    name=PROGRAM,
    cls=InstalledCommands,
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


class Example(StrEnum):
    """Files for which `potluck config` prints an annotated example."""

    RUN = "run"
    OPERATOR = "operator"


@app.callback()
def options(
    version: Annotated[bool, version_option(PROGRAM)] = False,
) -> None:
    """Options before the command."""
    del version


@app.command()
def config(
    what: Annotated[Example, typer.Argument(help="Configuration file to print.")] = Example.RUN,
) -> None:
    """Print an annotated example of a configuration file.

    It has all keys with their defaults. The task of the run file, `digits`, needs no files; replace
    it with your own. `potluck-server config` and `potluck-client config` print examples for the
    coordinator and the hosts.

    ```console
    potluck config > run.toml
    potluck config operator > operator.toml
    ```
    """
    text = example_run_file() if what is Example.RUN else example_operator_config()
    typer.echo(text, nl=False)


def _add(*groups: Mapping[str, Callable[..., Any]]) -> None:
    for commands in groups:
        for name, command in commands.items():
            app.command(name)(command)


app.command("demo", cls=CommandWithOldOptions)(demo)
app.command("doctor")(doctor)
_add(COMMANDS, PROFILE_COMMANDS, AUDIT_COMMANDS, REPORT_COMMANDS, DISCLOSURE_AUDIT_COMMANDS)
app.command("select", cls=CommandWithOldOptions)(select)
app.add_typer(clients_app, name="clients")
app.add_typer(pki_app, name="pki")


def main() -> None:
    """Entry point of the console script `potluck`."""
    run_command_line(app, program=PROGRAM)


if __name__ == "__main__":
    main()
