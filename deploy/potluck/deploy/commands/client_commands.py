"""`potluck clients`, with `quarantine` and `readmit`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from potluck.deploy.commands.connection import AsJson, operator_command
from potluck.deploy.operator.json_view import client_values, to_line
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.terminal import table_console
from potluck.deploy.view.listings import attendance_line, client_lines, clients_table

_MOST_IN_TABLE = 2000
"""Maximum number of clients shown as a table: laying out a table of this size takes a second."""

ClientName = Annotated[
    str, typer.Argument(metavar="ID", help="The client's id.", show_default=False)
]


class _ListByDefault(TyperGroup):
    """Command group: `potluck clients` without a subcommand runs `potluck clients list`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        help_asked = args[:1] == ["--help"]
        if not ctx.resilient_parsing and not help_asked and (not args or args[0].startswith("-")):
            args = ["list", *args]
        return super().parse_args(ctx, args)


async def list_clients(client: OperatorClient, as_json: AsJson = False) -> None:
    """List all clients that ever connected to the coordinator.

    The table shows each client's host and connection, how often it was selected, and how many of
    its updates became part of a model.

    ```console
    potluck clients
    ```
    """
    found = await client.list_clients()
    if as_json:
        typer.echo(to_line({"clients": [client_values(entry) for entry in found]}))
    elif found:
        if len(found) <= _MOST_IN_TABLE:
            table_console().print(clients_table(found, datetime.now(UTC)))
        else:
            for line in client_lines(found, datetime.now(UTC)):
                typer.echo(line)
        typer.echo(attendance_line(found))
    else:
        typer.echo("no host has connected yet; start hosts with `potluck-client --config FILE`")


async def quarantine(
    client: OperatorClient,
    client_id: ClientName,
    reason: Annotated[
        str,
        typer.Option(
            "--reason", help="Reason in one line, shown to operators.", show_default=False
        ),
    ],
) -> None:
    """Exclude a client from every selection, in all runs.

    Rounds in progress continue with the client. In quarantine, a client may still connect. A client
    that has never connected can be put into quarantine, too.

        potluck clients quarantine client-3 --reason "label counts contradict its updates"
    """
    await client.set_quarantine(client_id, reason)
    typer.echo(f"client {client_id} is in quarantine: {reason}")


async def readmit(client: OperatorClient, client_id: ClientName) -> None:
    """End the quarantine of a client.

    potluck clients readmit client-3
    """
    await client.set_quarantine(client_id, None)
    typer.echo(f"client {client_id} may be selected again")


app = typer.Typer(
    cls=_ListByDefault,
    rich_markup_mode="markdown",
    help="List all clients; exclude clients from selection.",
)
app.command("list")(operator_command(list_clients))
app.command("quarantine")(operator_command(quarantine))
app.command("readmit")(operator_command(readmit))
