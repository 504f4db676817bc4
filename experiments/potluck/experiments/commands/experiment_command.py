"""`potluck experiment`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from potluck.common.errors import ConfigurationError, RunError
from potluck.deploy.commands.run_commands import print_line
from potluck.deploy.local.interruption import run_interruptibly
from potluck.deploy.terminal import terminal
from potluck.deploy.view.readable import readable_count

if TYPE_CHECKING:
    from potluck.experiments.grid.definition import ExperimentFile
    from potluck.experiments.grid.grid_cells import Cell
    from potluck.experiments.grid.results import ResultsFolder
    from potluck.experiments.grid.running import CellRunner, GridOutcome

_FOLDERS = Path("potluck-experiments")
_DATA = Path("data")
_REPORTS = "potluck.experiments.reports.report_files"


File = Annotated[
    Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Apply the file's [quick] table: smaller and faster.")
]
Seeds = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Repeat each cell of the grid with these seeds, such as 0-9 or 0,3,5, instead of "
        "the file's. Results for other seeds are kept, but not reported.",
        show_default=False,
    ),
]
Hosts = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of client processes of each federation, instead of the file's."
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of cells to run in parallel. Default: as many as processors and memory allow.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder of the tasks' data. Default: ./data.",
        show_default=False,
    ),
]
Device = Annotated[
    str, typer.Option(help="Device for training: cpu, auto (a GPU if there is one), cuda:N.")
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
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="[ADDRESS]",
        help="Run the cells on the Ray cluster at HOST:PORT, or on this machine's cluster. Every "
        "machine needs the extra `ray`.",
        show_default=False,
    ),
]
RayGpus = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SHARE",
        help="Number of GPUs per host on the Ray cluster, such as 0.25 or 1.",
    ),
]
RayHostsApart = Annotated[
    bool,
    typer.Option(
        "--ray-hosts-apart", help="Spread the hosts of each cell over the Ray cluster's machines."
    ),
]
_THIS_CLUSTER = "auto"

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


class ExperimentCommand(TyperCommand):
    """A command whose option `--ray` may be given without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; insert "auto" as the cluster's address if `--ray` has none."""
        return super().parse_args(ctx, with_address(args))


def with_address(arguments: list[str]) -> list[str]:
    """Return the arguments with an address after each `--ray`; "auto" is inserted if it has none.

    The next argument is an address if it has a colon or is "auto"; otherwise it is a file.
    """
    found: list[str] = []
    for argument, following in itertools.pairwise([*arguments, ""]):
        found.append(argument)
        if argument == "--ray" and ":" not in following and following != _THIS_CLUSTER:
            found.append(_THIS_CLUSTER)
    return found


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

    cluster = _Cluster(ray, gpus=ray_gpus, apart=ray_hosts_apart)
    plan = load_experiment(file, quick=quick, seeds=None if seeds is None else seeds_in(seeds))
    cells = cells_of(plan, hosts=hosts or plan.hosts, source=file)
    name = f"{plan.name}-quick" if quick else plan.name
    folder = ResultsFolder(output or _FOLDERS / name)
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
            work = _Work(cells, folder, _data_folder(data), device, jobs)
            outcome = _run(work, cluster, console)
    from potluck.experiments.reports.report_files import write_report_files

    print_line(write_report_files(plan, cells, outcome.results, folder.folder, quick=quick))
    if outcome.failures:
        first = next(iter(outcome.failures.values()))
        raise RunError(
            f"{readable_count(len(outcome.failures), 'cell')} failed, the first because "
            f"{first.message}; the same command tries them again"
        )


def _show_assumptions(plan: ExperimentFile, console: Console) -> None:
    for each in plan.assumptions():
        console.print(
            f"assumed, not from the paper: {each.key}: {each.reason}", style="dim", markup=False,
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _data_folder(named: Path | None) -> Path | None:
    """Return the named folder, else ./data if it exists."""
    if named is None and _DATA.is_dir():
        return _DATA
    return named


def _list(cells: list[Cell], folder: ResultsFolder) -> None:
    finished = folder.finished(cells)
    for cell in cells:
        under_way = folder.workplace(cell).exists()
        state = "finished" if cell.digest in finished else "under way" if under_way else "to run"
        print_line(f"{state:9}  {cell.title}  ({readable_count(cell.rounds, 'round')})")
    print_line(f"{readable_count(len(cells), 'cell')}, {len(finished)} finished")


@dataclass(frozen=True)
class _Work:
    """Cells to run, and how to run them."""

    cells: list[Cell]
    folder: ResultsFolder
    data: Path | None
    device: str
    jobs: int | None


class _Cluster:
    """Options of the Ray cluster; without an address, no cluster is used.

    Raises ConfigurationError if other options are set without an address.
    """

    def __init__(self, address: str | None, *, gpus: float, apart: bool) -> None:
        if address is None and (gpus or apart):
            raise ConfigurationError(
                "--ray-gpus and --ray-hosts-apart are for a cluster; add --ray"
            )
        if gpus > 1 and gpus != round(gpus):
            raise ConfigurationError(
                f"--ray-gpus takes a share of one GPU or a whole number, got {gpus:g}", gpus=gpus
            )
        self.address, self.gpus, self.apart = address, gpus, apart


def _run(work: _Work, cluster: _Cluster, console: Console) -> GridOutcome:
    if cluster.address is None:
        return _run_cells(work, lambda: _local(work), console)
    from potluck.experiments.cluster.ray_cluster import check_machines, connected

    with connected(cluster.address):
        check_machines()
        return _run_cells(work, lambda: _on_ray(work, cluster), console)


def _run_cells(work: _Work, runner: Callable[[], CellRunner], console: Console) -> GridOutcome:
    from potluck.experiments.grid.experiment_progress import Board
    from potluck.experiments.grid.label_mix import LabelMixes
    from potluck.experiments.grid.running import run_missing

    mixes = LabelMixes(work.data)

    async def run() -> GridOutcome:
        return await run_missing(work.cells, work.folder, mixes, runner(), board)

    with Board(console) as board:
        return run_interruptibly(run())


def _local(work: _Work) -> CellRunner:
    from potluck.common.process.capacity import available_memory, available_processors
    from potluck.experiments.grid.local_cells import LocalCells, jobs_for

    most = work.jobs or jobs_for(
        max(cell.hosts for cell in work.cells),
        len(work.cells),
        processors=available_processors(),
        memory=available_memory(),
    )
    return LocalCells(work.folder, device=work.device, data=work.data, jobs=most)


def _on_ray(work: _Work, cluster: _Cluster) -> CellRunner:
    from potluck.experiments.cluster.ray_cells import ClusterOptions, RayCells

    device = "auto" if cluster.gpus and work.device == "cpu" else work.device
    options = ClusterOptions(device=device, jobs=work.jobs, gpus=cluster.gpus, apart=cluster.apart)
    runner = RayCells(work.folder, work.data, options)
    runner.check(work.cells)
    return runner
