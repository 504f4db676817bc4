"""`potluck deploy`: a federation on machines that this one reaches."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from potluck.common.errors import PotluckError
from potluck.deploy.commands.slurm_commands import app as slurm_app
from potluck.deploy.machines.deploy_plan import Step
from potluck.deploy.machines.deployment import (
    ContainerStatus,
    Deployment,
    follow_logs,
    roll_out,
    take_down,
)
from potluck.deploy.machines.inventory import FILE_NAME, example_inventory, load_inventory
from potluck.deploy.machines.side_by_side import raise_failures, side_by_side
from potluck.deploy.terminal import terminal

app = typer.Typer(
    name="deploy",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Run a federation on several machines with Docker.

`federation.toml` lists the machines and the hosts that run on them. Start with

```console
potluck deploy config > federation.toml
potluck deploy plan
potluck deploy up
```

Machines are reached over ssh, with the settings of the `ssh` program. Images are streamed to
all machines in parallel. Certificates are issued on this machine and copied. `up` only changes
what differs from the file, one container after another. After a failure, run it again to
complete the rest.""",
)

File = Annotated[Path, typer.Option("--file", "-f", help="Inventory file.")]
Machines = Annotated[
    list[str] | None, typer.Argument(help="Names of machines. Default: all.", show_default=False)
]
Parties = Annotated[
    list[str] | None,
    typer.Argument(
        help="Names of hosts or relays, or coordinator. Default: all.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
_DEFAULT = Path(FILE_NAME)

app.add_typer(slurm_app, name="slurm")


@app.command("config")
def print_config() -> None:
    """Print an annotated example of the inventory."""
    typer.echo(example_inventory(), nl=False)


@app.command()
def plan(machines: Machines = None, file: File = _DEFAULT, as_json: Json = False) -> None:
    """Show what `up` would change, and change nothing."""
    inventory, output = load_inventory(file), terminal()
    chosen = inventory.machines_named(machines or (), slurm=False)
    deployment = Deployment.prepared(inventory, chosen, issue=False)
    results = side_by_side(chosen, deployment.plan, terminal(stderr=True))
    if as_json:
        typer.echo(json.dumps({name: _as_json(each) for name, each in results.items()}))
    else:
        for party in deployment.to_issue:
            output.print(f"issue a certificate for {party}")
        _show_steps(results, output)
    raise_failures(results, terminal(stderr=True))


@app.command()
def up(machines: Machines = None, file: File = _DEFAULT) -> None:
    """Change machines so that they match the inventory.

    Issues missing certificates and transfers images. Then creates or replaces containers one after
    another, each after the previous one is connected. If one does not connect, the replaced
    container is restored, and the command stops. Only differences from the file are changed.
    """
    inventory, output = load_inventory(file), terminal()
    chosen = inventory.machines_named(machines or (), slurm=False)
    deployment = Deployment.prepared(inventory, chosen, issue=True)
    done = roll_out(deployment, chosen, terminal(stderr=True))
    _show_steps(done.results, output)
    for machine, step in done.left:
        output.print(Text(f"{machine}: step not done: {step}"), soft_wrap=True)
    raise_failures(done.results, terminal(stderr=True))


@app.command()
def status(machines: Machines = None, file: File = _DEFAULT, as_json: Json = False) -> None:
    """Show the containers' states, and whether they match the inventory."""
    inventory, output = load_inventory(file), terminal()
    chosen = inventory.machines_named(machines or (), slurm=False)
    deployment = Deployment.prepared(inventory, chosen, issue=False)
    results = side_by_side(chosen, deployment.status, terminal(stderr=True))
    found = [each for lines in results.values() if isinstance(lines, list) for each in lines]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found]))
    else:
        output.print(_status_table(found))
    raise_failures(results, terminal(stderr=True))


@app.command()
def logs(
    parties: Parties = None,
    file: File = _DEFAULT,
    tail: Annotated[
        int, typer.Option(min=0, help="Number of past lines to print per container.")
    ] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", help="Also print new lines, until interrupted.")
    ] = False,
) -> None:
    """Print the containers' logs, each line with its party in front."""
    inventory = load_inventory(file)
    chosen = inventory.machines_named((), slurm=False)
    work = partial(
        follow_logs, inventory=inventory, parties=parties or (), tail=tail, follow=follow
    )
    raise_failures(side_by_side(chosen, work, terminal(quiet=True)), terminal(stderr=True))


@app.command()
def restart(parties: Parties = None, file: File = _DEFAULT) -> None:
    """Restart containers. A round in progress resumes afterwards."""
    inventory, output = load_inventory(file), terminal()
    chosen = inventory.machines_named((), slurm=False)
    deployment = Deployment.prepared(inventory, chosen, issue=False)

    results = side_by_side(
        chosen,
        lambda machine, say: deployment.restart(machine, parties or (), say),
        terminal(stderr=True),
    )
    for names in results.values():
        for name in names if isinstance(names, list) else ():
            output.print(f"restarted {name}")
    raise_failures(results, terminal(stderr=True))


@app.command()
def down(
    machines: Machines = None,
    file: File = _DEFAULT,
    keep_state: Annotated[
        bool,
        typer.Option("--keep-state", help="Keep the volumes: runs, models and the hosts' state."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove without asking for confirmation.")
    ] = False,
) -> None:
    """Remove everything that `up` made, and nothing else: containers, volumes, images.

    Without --keep-state the coordinator's runs and models are lost, and so are the hosts' privacy
    ledgers.
    """
    inventory, output = load_inventory(file), terminal()
    chosen = inventory.machines_named(machines or (), slurm=False)
    if not keep_state and not yes:
        where = ", ".join(machine.name for machine in chosen)
        typer.confirm(
            f"Remove federation {inventory.federation} with all its state from {where}?", abort=True
        )
    results = side_by_side(
        chosen,
        lambda machine, say: take_down(machine, inventory, say, keep_state=keep_state),
        terminal(stderr=True),
    )
    for machine, gone in results.items():
        for name in gone if isinstance(gone, list) else ():
            output.print(f"{machine}: removed {name}")
    raise_failures(results, terminal(stderr=True))


def _as_json(result: list[Step] | PotluckError) -> object:
    if isinstance(result, PotluckError):
        return {"error": result.message}
    return [{"kind": each.kind, "subject": each.subject, "why": each.why} for each in result]


def _show_steps(results: dict[str, list[Step] | PotluckError], output: Console) -> None:
    for machine, steps in results.items():
        if isinstance(steps, PotluckError):
            continue
        for step in steps:
            output.print(Text(f"{machine}: {step}"), soft_wrap=True)
        if not steps:
            output.print(Text(f"{machine}: nothing to do"))


_STYLES = {"running": "green", "restarting": "yellow"}


def _status_table(found: list[ContainerStatus]) -> Table:
    table = Table(
        "machine", "party", "state", "since", "restarts", "to do, or last log line", box=None
    )
    for each in found:
        state = each.state if each.state != "exited" else f"exited ({each.exit_code})"
        note = each.pending or each.last_line
        table.add_row(
            each.machine,
            each.party,
            Text(state, style=_STYLES.get(each.state, "red")),
            each.started,
            str(each.restarts),
            Text(note),
        )
    return table
