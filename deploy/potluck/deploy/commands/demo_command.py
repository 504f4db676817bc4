"""`potluck demo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from potluck.common.process.capacity import available_memory, available_processors
from potluck.common.settings.extras import missing_library
from potluck.common.trainer import SHARE
from potluck.deploy.commands.connection import Assignments
from potluck.deploy.commands.old_options import CommandWithOldOptions
from potluck.deploy.local.before_start import check_demo
from potluck.deploy.local.demo import DemoRun, reserved_ports, run_demo, serve_metrics
from potluck.deploy.local.demo_files import (
    DemoFiles,
    DemoOptions,
    choices_of_user,
    demo_run_file,
    hold,
    new_folder,
    reserved_port,
    write_demo_files,
)
from potluck.deploy.local.interruption import run_interruptibly
from potluck.deploy.terminal import terminal
from potluck.deploy.view.readable import (
    readable_bytes,
    readable_count,
    readable_coverage,
    readable_measure,
    readable_seconds,
)
from potluck.deploy.view.run_comparison import LAST_ROUNDS, RunComparison, compare
from potluck.deploy.view.run_summary import RunSummary, summarise

_FOLDERS = Path("potluck-demo")


COMPARED = ("uniform", "dc-balanced")
"""Selectors that the demo compares."""
_SKEWED: Mapping[str, Mapping[str, Any]] = {"digits": {"alpha": 0.1, "digit_groups": True}}
"""The demo's default task options: clients have different labels, and each digit is a group."""
_WITH_SEED = {"digits", "colored-digits"}
"""Tasks whose data are split by a seed."""


Task = Annotated[str, typer.Option(help="Task to learn, such as digits.")]
Clients = Annotated[int, typer.Option(min=1, help="Number of clients of the federation.")]
Hosts = Annotated[
    int, typer.Option(min=1, help="Number of host processes; each runs some of the clients.")
]
ClientsPerRound = Annotated[
    int, typer.Option(min=1, help="Number of clients to select in each round.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Number of rounds.")]
Selectors = Annotated[
    list[str] | None,
    typer.Option(
        "--selector",
        metavar="NAME",
        help="Run this selector alone; repeat the option to compare several. "
        f"Default: {' and '.join(COMPARED)}.",
        show_default=False,
    ),
]
Target = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help='Accuracy in the worst group for "rounds to the target".'),
]
Strategy = Annotated[str, typer.Option(help="Strategy that combines updates.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed; it determines the data, cohorts and model.")]
Device = Annotated[
    str, typer.Option(help="Device for training: cpu, auto (a GPU if there is one), cuda:N.")
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder of tasks' data; `potluck data prepare` fills it.",
        show_default=False,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        help="Folder for certificates, configurations, logs and results. Default: a new folder "
        "in potluck-demo.",
        show_default=False,
    ),
]
JsonSummary = Annotated[
    bool,
    typer.Option("--json", help="Print only the summary, as JSON."),
]


def demo(
    task: Task = "digits",
    clients: Clients = 24,
    hosts: Hosts = 4,
    clients_per_round: ClientsPerRound = 6,
    rounds: Rounds = 40,
    selector: Selectors = None,
    target: Target = 0.7,
    strategy: Strategy = "fedavg",
    seed: Seed = 7,
    device: Device = "cpu",
    data: Data = None,
    folder: Folder = None,
    assignments: Assignments = None,
    as_json: JsonSummary = False,
) -> None:
    """Train twice in a throwaway federation on this machine.

    The first run selects clients by chance, the second with a selector. A coordinator and some
    client processes are started with certificates of their own, exactly as they would be on many
    machines. They make two runs one after another, with the same data and seed. Then the demo
    compares how well the worst group is recognised. The folder keeps the files, the logs, the
    models, a summary and a plot. Ctrl-C ends all processes at any time.

    ```console
    potluck demo
    potluck demo --selector fedentopt --rounds 5
    potluck demo --selector uniform --selector kl --seed 3
    potluck demo --task mnist --data data -o task.clients=24
    ```
    """
    names = list(dict.fromkeys(selector or COMPARED))
    arms = [
        DemoOptions(
            name=name if len(names) > 1 else "demo",
            task=task,
            task_options=_task_options(task, seed),
            selector=name,
            strategy=strategy,
            clients=clients,
            hosts=hosts,
            count=clients_per_round,
            rounds=rounds,
            seed=seed,
            device=device,
            workers=workers_of_host(device, clients, hosts),
            choices=choices_of_user(),
            data=data,
            assignments=assignments or (),
            disclosure={"simulation_seed": seed},
            root=True,
        )
        for name in names
    ]
    console = terminal(stderr=as_json)
    for options in arms:
        check_demo(options)
    files, summaries = _run(arms, folder or new_folder(_FOLDERS, datetime.now()), console)
    comparison = compare(summaries, target=target) if len(summaries) > 1 else None
    result: RunSummary | RunComparison = comparison or summaries[-1]
    files.summary.write_text(result.model_dump_json(indent=2) + "\n")
    plot = _plot(result, files)
    if comparison is not None:
        print_comparison(console, comparison, files, plot=plot)
    else:
        print_summary(console, summaries[-1], files, plot=plot)
    if as_json:
        typer.echo(result.model_dump_json())


def _task_options(task: str, seed: int) -> dict[str, Any]:
    """Return the options of a demo's task. The seed also splits the data over clients."""
    return {**_SKEWED.get(task, {}), **({"seed": seed} if task in _WITH_SEED else {})}


def workers_of_host(device: str, clients: int, hosts: int) -> int:
    """Return the number of worker processes per host of a demo.

    The hosts share this machine's processors and memory equally. Both limit the number, and so does
    the number of clients per host. It is 1 if there may be a GPU, which the workers would share as
    well.
    """
    from potluck.client.training.processes.worker_count import automatic  # only `demo` needs it

    if device != "cpu":
        return 1
    return automatic(
        -(-clients // hosts),
        threads=1,
        processors=available_processors() // hosts,
        memory=available_memory() // hosts,
    )


def _run(
    arms: Sequence[DemoOptions], place: Path, console: Console
) -> tuple[DemoFiles, list[RunSummary]]:
    """Start one federation, and make one run in it for each of `arms`, the options of one run
    each."""
    first, *others = arms
    made = [demo_run_file(options) for options in arms]
    with (
        hold(place),
        reserved_port() as port,
        reserved_ports(1 + first.hosts) as metrics_ports,
    ):
        files = write_demo_files(place, first, port, more_runs=[run for _, run in made[1:]])
        prometheus = serve_metrics(files, metrics_ports)
        console.print(
            f"all files of this demo are in {files.folder}",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        console.print(
            "to plot metrics during the run, if Prometheus is installed: prometheus "
            f"--config.file={prometheus}",
            style="dim", highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        runs = [
            DemoRun(options.name, text, files.model_of(options.name) if others else files.model)
            for options, (text, _) in zip(arms, made, strict=True)
        ]
        views = run_interruptibly(run_demo(files, console, runs))
    return files, [summarise(view, clients=first.clients) for view in views]


def _plot(result: RunSummary | RunComparison, files: DemoFiles) -> str:
    """Draw the plot if matplotlib is installed. Return its path, or why there is no plot."""
    try:
        # matplotlib takes a second to import
        from potluck.deploy.view.run_plot import plot_comparison, plot_run
    except ModuleNotFoundError as error:
        remedy = missing_library(error)
        if remedy is None:
            raise
        return f"none: {remedy}"
    if isinstance(result, RunComparison):
        plot_comparison(result, files.plot)
    else:
        plot_run(result, files.plot)
    return str(files.plot)


def print_comparison(
    console: Console, comparison: RunComparison, files: DemoFiles, *, plot: str
) -> None:
    """Print runs side by side. plot: the plot's path, or the reason why there is none."""
    measure, first = comparison.measure, comparison.runs[0]
    target = readable_measure(comparison.target, measure.unit)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(measure.label)
    for arm in comparison.arms:
        table.add_column(arm.selector, justify="right", overflow="fold")
    rows: dict[str, list[str]] = {
        f"mean of the last {LAST_ROUNDS} rounds": [
            readable_measure(arm.last, measure.unit) for arm in comparison.arms
        ],
        f"first round at {target}": [
            "not reached" if arm.reached is None else str(arm.reached) for arm in comparison.arms
        ],
        f"models moved to {target}": [
            "–" if arm.bytes_to_target is None else readable_bytes(arm.bytes_to_target)
            for arm in comparison.arms
        ],
        "models moved in all": [readable_bytes(arm.bytes_total) for arm in comparison.arms],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    console.print()
    console.print(
        f"{first.task}, {readable_count(first.rounds, 'round')} with {first.count} of "
        f"{readable_count(first.clients, 'client')}, same data and seed:",
        highlight=False, markup=False,
    )  # fmt: skip
    console.print(table)
    console.print()
    paths = Table(show_header=False, box=None, pad_edge=False)
    paths.add_column(style="bold")
    paths.add_column(overflow="fold")
    for name, path in (("models", files.folder), ("summary", files.summary), ("plot", plot)):
        paths.add_row(name, Text(str(path)))
    console.print(paths)


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


app = typer.Typer()
app.command("demo", cls=CommandWithOldOptions)(demo)
