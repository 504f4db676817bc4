"""Commands for existing runs: `potluck runs`, `watch`, `stop`, `resume` and `delete`."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from potluck.common.errors import ConfigurationError, RunError
from potluck.common.process.command_line import FAILED
from potluck.deploy.commands.connection import (
    AsJson,
    RunId,
    RunOrNewest,
    newest_run,
    operator_command,
)
from potluck.deploy.operator.json_view import status_values, to_line
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_view import ENDED, run_state_name
from potluck.deploy.terminal import table_console, terminal
from potluck.deploy.view.listings import run_table, runs_table
from potluck.deploy.view.watch import display_for, follow, is_finished
from potluck.deploy.view.watch_lines import status_line

_SHOWN_ROUNDS = 100
"""Default number of earlier rounds shown to a person; with --json, a program gets all rounds."""


async def watch(
    client: OperatorClient,
    run_id: RunOrNewest = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=0,
            help="Number of past rounds to show; 0 for all, as with --json. [default: 100]",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run's rounds and their clients until it ends.

    Without a terminal every event is a plain line; with --json an object per line. If the
    coordinator stops, the command waits for it. The exit code is 0 if the run finishes, 1 if it
    fails or is stopped. Ctrl-C ends the watching, not the run.

    ```console
    potluck watch
    potluck watch 3f9a --json
    ```
    """
    run_id = run_id or await newest_run(client)
    await follow_run(client, run_id, as_json=as_json, rounds=rounds)


async def runs(
    client: OperatorClient,
    run_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Show only this run, with all known facts.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        bool, typer.Option("--file", help="Print the run file with which the run was started.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List all runs, newest first, or show one.

    Other commands take a run's id from here, a unique beginning of it, or a name that no other
    run has.

    ```console
    potluck runs
    potluck runs 3f9a
    potluck runs 3f9a --file > run.toml
    ```
    """
    if file:
        text = await client.fetch_run_file(run_id or await newest_run(client))
        typer.echo(to_line({"run_file": text}) if as_json else text.rstrip("\n"))
        return
    found = await client.list_runs() if run_id is None else [await client.find_run(run_id)]
    lost = await client.lost_runs() if run_id is None else []
    if as_json:
        values: dict[str, object] = {"runs": [status_values(status) for status in found]}
        typer.echo(to_line(values | ({"lost": lost} if lost else {})))
    elif run_id is not None:
        table_console().print(run_table(found[0], datetime.now(UTC)))
    elif found:
        console = table_console()
        console.print(runs_table(found, datetime.now(UTC), width=console.width))
    elif not lost:
        typer.echo("no runs yet; start one with `potluck run FILE`")
    for reason in () if as_json else lost:
        typer.echo(reason)


async def stop(client: OperatorClient, run_id: RunId, as_json: AsJson = False) -> None:
    """Stop a run, and keep its last committed model.

    Its current round is abandoned. Prints the run's state after that.

    ```console
    potluck stop 3f9a
    ```
    """
    status = await client.stop_run(run_id)
    typer.echo(to_line(status_values(status)) if as_json else status_line(status))


async def delete(
    client: OperatorClient,
    run_id: RunId,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete without asking for confirmation.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the rounds and models of a run that is over.

    Models that other runs also have are not deleted. Nor is the record of what its clients
    disclosed, because it accounts for their privacy. The command asks first; without a terminal,
    it needs --yes.

    ```console
    potluck delete 3f9a
    ```
    """
    status = await client.find_run(run_id)
    if status.state not in ENDED:
        state = run_state_name(status.state)
        raise RunError(
            f"run {status.run_id} is {state}; stop it first: `potluck stop {status.run_id}`"
        )
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigurationError(
                f"{status_line(status)}; add --yes to delete the run, since the command can't ask "
                "without a terminal"
            )
        typer.confirm(f"{status_line(status)}; delete it?", abort=True)
    status = await client.delete_run(status.run_id)
    deleted = f"deleted run {status.run_id} ({status.name})"
    typer.echo(to_line(status_values(status)) if as_json else deleted)


async def resume(
    client: OperatorClient,
    run_id: RunOrNewest = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a run that was stopped or has failed.

    The run continues after its last committed round. A run that a crash or a restart of the
    coordinator interrupted continues by itself.

    ```console
    potluck resume
    potluck resume 3f9a --watch
    ```
    """
    run_id = run_id or await newest_run(client)
    status = await client.resume_run(run_id)
    typer.echo(to_line(status_values(status)) if as_json else status_line(status))
    if watch:
        await follow_run(client, status.run_id, as_json=as_json)


async def follow_run(
    client: OperatorClient, run_id: str, *, as_json: bool, rounds: int | None = None
) -> None:
    """Show a run until it ends. Raises typer.Exit if it does not finish.

    rounds: number of past rounds to show, 0 for all; None for the default.
    """
    if rounds is None:
        rounds = 0 if as_json else _SHOWN_ROUNDS
    try:
        with display_for(terminal(), as_json=as_json) as display:
            view = await follow(client, run_id, display, newest_rounds=rounds)
    except asyncio.CancelledError:  # by Ctrl-C
        hint = f"(`potluck watch {run_id}`, `potluck stop {run_id}`)"
        typer.echo(f"stopped watching; run {run_id} continues {hint}", err=True)
        raise
    if not is_finished(view):
        raise typer.Exit(FAILED)  # the display has shown the reason


app = typer.Typer()
app.command("watch")(operator_command(watch))
app.command("runs")(operator_command(runs))
app.command("stop")(operator_command(stop))
app.command("resume")(operator_command(resume))
app.command("delete")(operator_command(delete))
