"""`potluck experiment`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from potluck.common.errors import RunError
from potluck.deploy.terminal import terminal
from potluck.deploy.view.readable import readable_count
from potluck.experiments.commands.grid_work import (
    Data,
    Device,
    ExperimentCommand,
    GridWork,
    Jobs,
    Ray,
    RayChoice,
    RayGpus,
    RayHostsApart,
    data_folder,
    run_work,
)

if TYPE_CHECKING:
    from potluck.experiments.grid.definition import ExperimentFile
    from potluck.experiments.grid.grid_cells import Cell
    from potluck.experiments.grid.results import ResultsFolder

FOLDERS = Path("potluck-experiments")
_REPORTS = "potluck.experiments.reports.report_files"


File = Annotated[
    Path, typer.Argument(metavar="FILE", help="Experiment file (TOML).", show_default=False)
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Apply the file's [quick] table, for a smaller grid.")
]
Seeds = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Seeds, such as 0-9 or 0,3,5, instead of the file's.",
        show_default=False,
    ),
]
Hosts = Annotated[
    int | None,
    typer.Option(min=1, help="Number of hosts per federation, instead of the file's."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for the results. Default: potluck-experiments/NAME.",
        show_default=False,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="List all cells and their states, without running any.")
]
ReportOnly = Annotated[
    bool,
    typer.Option(
        "--report-only", help="Write the report of the finished cells, without running any."
    ),
]
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command("experiment", cls=ExperimentCommand)
def experiment(
    file: File,
    quick: Quick = False,
    seeds: Seeds = None,
    hosts: Hosts = None,
    jobs: Jobs = None,
    data: Data = None,
    device: Device = "cpu",
    output: Output = None,
    dry_run: DryRun = False,
    report_only: ReportOnly = False,
    ray: Ray = None,
    ray_gpus: RayGpus = 0.0,
    ray_hosts_apart: RayHostsApart = False,
) -> None:
    """Run a grid of settings × seeds and write a report.

    Every cell is a federation of its own: a coordinator and some hosts with certificates, as they
    would be on many machines. Finished cells are kept: after Ctrl-C, a crash or a change of the
    file, the same command runs the missing cells, and resumes the unfinished ones.

    The folder gets `report.html`, `report.md`, `rounds.parquet` and `rounds.csv` (a row for each
    cell and round, the same whenever the experiment is run) and `timings.csv`.

    ```console
    potluck experiment experiments/dc-mnist.toml --quick --data data
    potluck experiment mine.toml --seeds 0-9
    potluck experiment mine.toml --dry-run
    potluck experiment mine.toml --ray 10.0.0.1:6379
    ```
    """
    from potluck.experiments.grid.definition import load_experiment, seeds_in
    from potluck.experiments.grid.grid_cells import cells_of
    from potluck.experiments.grid.results import ResultsFolder
    from potluck.experiments.grid.running import GridOutcome

    cluster = RayChoice(ray, gpus=ray_gpus, apart=ray_hosts_apart)
    plan = load_experiment(file, quick=quick, seeds=None if seeds is None else seeds_in(seeds))
    cells = cells_of(plan, hosts=hosts or plan.hosts, source=file)
    name = f"{plan.name}-quick" if quick else plan.name
    folder = ResultsFolder(output or FOLDERS / name)
    console = terminal(stderr=True)
    _show_assumptions(plan, console)
    if dry_run:
        _list(cells, folder)
        return
    if report_only:
        outcome = GridOutcome(results=folder.finished(cells), failures={})
    else:
        with folder.opened():
            import_module(_REPORTS)  # fails before the work if a library is missing
            work = GridWork(cells, folder, data_folder(data), device, jobs)
            outcome = run_work(work, cluster, console)
    from potluck.experiments.reports.report_files import write_report_files

    typer.echo(write_report_files(plan, cells, outcome.results, folder.folder, quick=quick))
    if outcome.failures:
        first = next(iter(outcome.failures.values()))
        raise RunError(
            f"{readable_count(len(outcome.failures), 'cell')} failed, the first because "
            f"{first.message}; run the same command to try failed cells again"
        )


def _show_assumptions(plan: ExperimentFile, console: Console) -> None:
    for each in plan.assumptions():
        console.print(
            f"assumed value, not from the paper: {each.key}: {each.reason}",
            style="dim",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _list(cells: list[Cell], folder: ResultsFolder) -> None:
    finished = folder.finished(cells)
    for cell in cells:
        under_way = folder.workplace(cell).exists()
        state = "finished" if cell.digest in finished else "under way" if under_way else "to run"
        typer.echo(f"{state:9}  {cell.title}  ({readable_count(cell.rounds, 'round')})")
    typer.echo(f"{readable_count(len(cells), 'cell')}, {len(finished)} finished")
