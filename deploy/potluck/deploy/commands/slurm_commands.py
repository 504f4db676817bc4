"""`potluck deploy slurm`: hosts as jobs of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from potluck.deploy.machines.inventory import FILE_NAME, load_inventory
from potluck.deploy.machines.party_files import issue_missing, parties_on, read_files
from potluck.deploy.machines.slurm import SlurmMachine
from potluck.deploy.terminal import terminal

app = typer.Typer(
    name="slurm",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Run hosts as jobs of a Slurm cluster.

Each machine with `engine = "slurm"` becomes one job. Run these commands where `sbatch` is, in the
folder of `federation.toml`:

```console
potluck deploy slurm up
potluck deploy slurm status
potluck deploy slurm down
```

Jobs may be preempted, requeued or run out of time: hosts save their work, and resume it when the
job runs again.
""",
)

File = Annotated[Path, typer.Option("--file", "-f", help="Inventory file.")]
Machines = Annotated[
    list[str] | None, typer.Argument(help="Names of machines. Default: all.", show_default=False)
]
_DEFAULT = Path(FILE_NAME)


@app.command()
def up(machines: Machines = None, file: File = _DEFAULT) -> None:
    """Submit missing jobs, and replace those that differ from the inventory.

    Jobs are submitted one after another: each after the hosts of the previous job are connected, or
    that job waits in the queue. If a job ends, the command stops.
    """
    inventory = load_inventory(file)
    chosen = inventory.machines_named(machines or (), slurm=True)
    parties = parties_on(chosen, inventory)
    issue_missing(parties, inventory)
    files = {party.name: read_files(party, inventory) for party in parties}
    for machine in chosen:
        entry = SlurmMachine(machine, inventory)
        since = entry.log_size()
        job, done = entry.up(files)
        typer.echo(f"{machine.name}: job {job.job_id}: {done}")
        if done != "nothing to do":
            how = entry.await_connected(job, inventory.connect_seconds, since=since)
            typer.echo(f"{machine.name}: job {job.job_id}: {how}")


@app.command()
def status(machines: Machines = None, file: File = _DEFAULT) -> None:
    """Show the states of the jobs."""
    inventory = load_inventory(file)
    table = Table("machine", "job", "state", "nodes, or reason", "log", box=None)
    for machine in inventory.machines_named(machines or (), slurm=True):
        entry = SlurmMachine(machine, inventory)
        job = entry.look()
        if job is None:
            table.add_row(machine.name, "", "not submitted", "", "")
        else:
            log = str(entry.folder / "log")
            table.add_row(machine.name, job.job_id, job.state, job.where, log)
    terminal(soft_wrap=True).print(table)


@app.command()
def down(machines: Machines = None, file: File = _DEFAULT) -> None:
    """Cancel the jobs by their ids. The hosts' state stays in the shared folder."""
    inventory = load_inventory(file)
    for machine in inventory.machines_named(machines or (), slurm=True):
        job = SlurmMachine(machine, inventory).down()
        if job is not None:
            typer.echo(f"{machine.name}: job {job.job_id}: cancelled")
