"""`potluck demo`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from potluck.common.process.capacity import available_memory, available_processors
from potluck.common.settings.extras import missing_library
from potluck.common.trainer import SHARE
from potluck.deploy.commands.run_commands import Assignments
from potluck.deploy.local.before_start import check_demo
from potluck.deploy.local.demo import run_demo
from potluck.deploy.local.demo_files import (
    DemoFiles,
    DemoOptions,
    choices_of_user,
    hold,
    new_folder,
    reserved_port,
    write_demo_files,
)
from potluck.deploy.local.demo_metrics import reserved_ports, serve_metrics
from potluck.deploy.local.interruption import run_interruptibly
from potluck.deploy.terminal import terminal
from potluck.deploy.view.readable import (
    readable_bytes,
    readable_coverage,
    readable_measure,
    readable_seconds,
)
from potluck.deploy.view.run_summary import RunSummary, summarise

_FOLDERS = Path("potluck-demo")


Task = Annotated[str, typer.Option(help="What is learned.")]
Clients = Annotated[int, typer.Option(min=1, help="Clients of the federation.")]
Hosts = Annotated[int, typer.Option(min=1, help="Client processes that hold them.")]
Count = Annotated[int, typer.Option(min=1, help="Clients selected in each round.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds to commit.")]
Selector = Annotated[str, typer.Option(help="Who trains.")]
Strategy = Annotated[str, typer.Option(help="How updates combine.")]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same cohorts, same model.")]
Device = Annotated[
    str, typer.Option(help="What the hosts train on: cpu, auto (a GPU if there is one), cuda:N.")
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="The folder in which tasks such as mnist find their data; `potluck data` fills it.",
        show_default=False,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        help="Where certificates, configurations, logs and results go; a new folder under "
        "potluck-demo if left out.",
        show_default=False,
    ),
]
JsonSummary = Annotated[
    bool,
    typer.Option(
        "--json", help="Print the summary as the last line on standard output, nothing else."
    ),
]


def demo(
    task: Task = "colored-digits",
    clients: Clients = 24,
    hosts: Hosts = 4,
    count: Count = 9,
    rounds: Rounds = 30,
    selector: Selector = "uniform",
    strategy: Strategy = "fedavg",
    seed: Seed = 7,
    device: Device = "cpu",
    data: Data = None,
    folder: Folder = None,
    assignments: Assignments = None,
    as_json: JsonSummary = False,
) -> None:
    """Make a throwaway federation on this machine, run it, show it live.

    A coordinator and some client processes are started with certificates of their own, exactly as
    they would be on many machines. The folder keeps the files, the logs, the model, a summary and
    a plot. Ctrl-C ends all processes at any time.

    ```console
    potluck demo
    potluck demo --rounds 5 --count 4 -o training.epochs=2
    potluck demo --task mnist --data data -o task.clients=24
    ```
    """
    options = DemoOptions(
        task=task,
        selector=selector,
        strategy=strategy,
        clients=clients,
        hosts=hosts,
        count=count,
        rounds=rounds,
        seed=seed,
        device=device,
        workers=workers_of_host(device, clients, hosts),
        choices=choices_of_user(),
        data=data,
        assignments=assignments or (),
        root=True,
    )
    console = terminal(stderr=as_json)
    check_demo(options)
    files, summary = _run(options, folder or new_folder(_FOLDERS, datetime.now()), console)
    files.summary.write_text(summary.model_dump_json(indent=2) + "\n")
    print_summary(console, summary, files, plot=_plot(summary, files))
    if as_json:
        typer.echo(summary.model_dump_json())


def workers_of_host(device: str, clients: int, hosts: int) -> int:
    """Return the number of worker processes per host of a demo.

    The hosts share this machine's processors and memory equally; the number is limited by these
    and by the clients per host. It is 1 if there may be a GPU, which the workers would also share.
    """
    from potluck.client.training.processes.worker_count import automatic  # a demo alone needs it

    if device != "cpu":
        return 1
    return automatic(
        -(-clients // hosts),
        threads=1,
        processors=available_processors() // hosts,
        memory=available_memory() // hosts,
    )


def _run(options: DemoOptions, place: Path, console: Console) -> tuple[DemoFiles, RunSummary]:
    with (
        hold(place),
        reserved_port() as port,
        reserved_ports(1 + options.hosts) as metrics_ports,
    ):
        files = write_demo_files(place, options, port)
        prometheus = serve_metrics(files, metrics_ports)
        console.print(
            f"everything of this demo is in {files.folder}",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        console.print(
            f"to graph its metrics while it runs, if you have Prometheus: "
            f"prometheus --config.file={prometheus}",
            style="dim", highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        view = run_interruptibly(run_demo(files, console))
    return files, summarise(view, clients=options.clients)


def _plot(summary: RunSummary, files: DemoFiles) -> str:
    """Draw the plot if matplotlib is installed. Return its path, or the reason for having none."""
    try:
        from potluck.deploy.view.run_plot import plot_run  # matplotlib takes a second to import
    except ModuleNotFoundError as error:
        remedy = missing_library(error)
        if remedy is None:
            raise
        return f"none: {remedy}"
    plot_run(summary, files.plot)
    return str(files.plot)


def print_summary(console: Console, summary: RunSummary, files: DemoFiles, *, plot: str) -> None:
    """Print the result of the run. plot: the plot's path, or the reason why there is none."""
    first, last = summary.history[0], summary.history[-1]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("rounds", f"{summary.rounds} in {readable_seconds(summary.seconds)}")
    shares_first = sorted(summary.measures, key=lambda each: each.unit != SHARE)
    for measure in shares_first:
        before, after = (
            readable_measure(entry.value(measure.name), measure.unit) for entry in (first, last)
        )
        if last.value(measure.name) is not None:
            behind, earlier = (each.coverage.get(measure.name) for each in (last, first))
            over = f", over {readable_coverage(behind.coverage)}" if behind is not None else ""
            mark = " (partial)" if earlier is not None and earlier.partial else ""
            table.add_row(measure.label, f"{before}{mark} → {after}{over}")
    moved = f"{readable_bytes(summary.bytes_down)} down, {readable_bytes(summary.bytes_up)} up"
    table.add_row("models moved", moved)
    for name, path in (("model", files.model), ("summary", files.summary), ("plot", plot)):
        table.add_row(name, Text(str(path)))
    console.print()
    console.print(table)
